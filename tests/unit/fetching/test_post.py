"""A POST reaches what the policy allows and nothing else, and takes little of an answer."""

import asyncio
from ipaddress import ip_network

import pytest

from mlcd.errors import ImageRejected
from mlcd.fetching.policy import FetchPolicy
from mlcd.fetching.url_client import UrlClient
from mlcd.fetching.urls import parse_url
from tests.image_host import ImageHost, endless, ok, redirect, status

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def post(host, path, *, networks=("127.0.0.0/8",), name="a.example", turn_s=5.0):
    policy = FetchPolicy(
        hosts=("a.example",),
        networks=tuple(map(ip_network, networks)),
        ports=(host.port,),
        turn_s=turn_s,
    )

    async def send():
        async with UrlClient(policy, look_up=lambda *_: ["127.0.0.1"]) as client:
            url = parse_url(f"http://{name}:{host.port}{path}")
            return await client.post(url, b"content", [(b"Connection", b"close")])

    return asyncio.run(send())


@pytest.fixture
def host():
    with ImageHost({}) as host:
        host.answers = {
            "/ok": ok(b"thanks", "text/plain", retry_after="7"),
            "/refused": status(503),
            "/moved": redirect("/ok"),
            "/large": endless(HEAD, b"1000\r\n" + bytes(0x1000) + b"\r\n"),
            "/slow": lambda _: host.wait(),
            "/broken": b"no HTTP\r\n\r\n",
        }
        yield host


def test_the_status_and_the_headers_are_returned(host):
    answer = post(host, "/ok")
    assert (answer.status, answer.fields[b"retry-after"]) == (200, b"7")
    assert post(host, "/refused").status == 503
    ((_, headers), _) = host.asked
    assert (headers["content-length"], headers["host"]) == ("7", f"a.example:{host.port}")


def test_a_redirect_is_an_answer(host):
    assert post(host, "/moved").status == 302
    assert host.paths == ["/moved"]


def test_of_an_endless_answer_the_status_counts(host):
    assert post(host, "/large").status == 200


def test_a_host_that_is_slow_or_broken_is_an_error(host):
    with pytest.raises(TimeoutError):
        post(host, "/slow", turn_s=0.3)
    with pytest.raises(ImageRejected, match="connection failed"):
        post(host, "/broken")


@pytest.mark.parametrize(
    "forbidden", [{"networks": ("10.0.0.0/8",)}, {"networks": ()}, {"name": "b.example"}]
)
def test_nothing_is_sent_where_the_policy_forbids_it(host, forbidden):
    with pytest.raises(ImageRejected) as caught:
        post(host, "/ok", **forbidden)
    assert caught.value.reason == "url-refused"
    assert host.asked == []
