"""One request against a real server that behaves as told."""

import asyncio
import contextlib
import json
import time

import pytest

from mlcd.client.connection import Connection
from mlcd.client.refusals import (
    AnswerInvalid,
    Refused,
    RefusedAccess,
    RefusedConflict,
    RefusedInput,
    RefusedLate,
    RefusedNotFound,
    RefusedOverload,
    RefusedUnavailable,
)
from mlcd.errors import (
    ConfigInvalid,
    Conflict,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    Overloaded,
    Unavailable,
)
from tests.conftest import free_port
from tests.unit.client.scripted import Reply, scripted

BUSY = Reply(429, b"", {"Retry-After": "1"})
KEY = "mlcd-SECRET-key"


def ask(url, **options):
    async def once():
        given = {"api_key": None, "deadline_s": 20, "retries": 3, "transport": None} | options
        connection = Connection(url, **given)
        async with contextlib.aclosing(connection):
            return await connection.ask("POST", "/v1/images/embed", images=[b"a", b"b"])

    return asyncio.run(once())


def problem(status, **fields):
    body = {
        "type": "urn:mlcd:problem:some-name",
        "title": "T",
        "status": status,
        "detail": "what is wrong",
    } | fields
    return Reply(
        status,
        json.dumps(body).encode(),
        {"Content-Type": "application/problem+json", "X-Request-Id": "r7"},
    )


def test_a_busy_server_is_asked_again_and_never_before_it_said():
    with scripted(BUSY, BUSY, Reply(body=b"here")) as (url, asked):
        assert ask(url).content == b"here"
    first, second, third = asked
    assert second.at - first.at >= 1
    assert third.at - second.at >= 1
    assert first.body.count(b"filename") == 2
    assert len({request.headers["x-request-id"] for request in asked}) == 1
    # The whole of it is sent again; only the boundary is new.
    assert len({len(request.body) for request in asked}) == 1


@pytest.mark.parametrize("later", [Reply(503), Reply(502, b"<html>"), Reply(drop=True)])
def test_what_passes_by_itself_is_waited_out(later):
    with scripted(later, Reply(body=b"here")) as (url, asked):
        assert ask(url).content == b"here"
        assert len(asked) == 2


@pytest.mark.parametrize(
    ("status", "cls", "kind"),
    [
        (400, RefusedInput, InvalidInput),
        (401, RefusedAccess, Refused),
        (403, RefusedAccess, Refused),
        (404, RefusedNotFound, NotFound),
        (409, RefusedConflict, Conflict),
        (413, RefusedInput, InvalidInput),
        (415, RefusedInput, InvalidInput),
        (422, RefusedInput, InvalidInput),
        (500, Refused, Refused),
        (504, RefusedLate, DeadlineExceeded),
    ],
)
def test_what_no_repeat_mends_is_raised_at_once_with_all_that_the_server_said(status, cls, kind):
    with scripted(problem(status, index=3, limit="max_images", param="files")) as (url, asked):
        with pytest.raises(kind) as caught:
            ask(url)
        assert len(asked) == 1
    assert type(caught.value) is cls
    said = caught.value.problem
    expected = (status, "some-name", "what is wrong", "r7")
    assert (said.status, said.name, said.detail, said.request_id) == expected
    assert (said.index, said.limit, said.param) == (3, "max_images", "files")
    assert str(caught.value) == f"what is wrong (status {status}, request r7)"


@pytest.mark.parametrize(
    ("reply", "cls"), [(BUSY, RefusedOverload), (Reply(503), RefusedUnavailable)]
)
def test_repeats_are_bounded(reply, cls):
    with scripted(reply) as (url, asked):
        with pytest.raises(cls) as caught:
            ask(url, retries=1)
        assert len(asked) == 2
    assert isinstance(caught.value, Unavailable)
    assert isinstance(caught.value, Overloaded) == (cls is RefusedOverload)
    assert caught.value.problem.retry_after_s == (1 if cls is RefusedOverload else None)


def test_there_is_no_waiting_for_what_comes_too_late():
    with scripted(Reply(429, headers={"Retry-After": "3600"})) as (url, asked):
        started = time.monotonic()
        with pytest.raises(RefusedOverload):
            ask(url, deadline_s=5)
        assert time.monotonic() - started < 3
        assert len(asked) == 1


@pytest.mark.parametrize("slow", [Reply(wait_s=30), Reply(body=b"x" * 500, drip_s=0.1)])
def test_the_deadline_is_over_all_of_it(slow):
    with scripted(slow) as (url, asked):
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.7 s \(request") as caught:
            ask(url, deadline_s=0.7)
        assert 0.6 < time.monotonic() - started < 5
        assert asked[0].headers["x-request-id"] in str(caught.value)


def test_a_server_that_is_not_there_is_named():
    url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(Unavailable, match=f"{url} cannot be reached: start it with `mlcd serve`"):
        ask(url, retries=8)
    assert 0.2 < time.monotonic() - started < 3


def test_a_server_that_has_answered_is_waited_for_while_it_restarts():
    async def ask_again():
        with scripted(Reply()) as (url, _):
            connection = Connection(url, api_key=None, deadline_s=20, retries=8, transport=None)
            await connection.ask("GET", "/v1/info")
        async with contextlib.aclosing(connection), asyncio.timeout(3):
            await connection.ask("GET", "/v1/info")

    with pytest.raises(TimeoutError):
        asyncio.run(ask_again())


def test_the_page_of_a_proxy_is_not_repeated_to_the_user():
    with (
        scripted(Reply(500, b"<html>SECRET of the proxy")) as (url, _),
        pytest.raises(Refused) as caught,
    ):
        ask(url)
    assert "SECRET" not in str(caught.value)
    assert "the server answered 500" in str(caught.value)


def test_the_key_is_sent_and_shown_nowhere():
    with scripted(problem(401)) as (url, asked), pytest.raises(RefusedAccess) as caught:
        ask(url, api_key=KEY)
    assert asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(caught.value) + str(caught.value)


def test_a_redirect_is_not_followed():
    with scripted(Reply(body=b"stolen")) as (elsewhere, stolen):
        moved = Reply(307, b"", {"Location": f"{elsewhere}/v1/images/embed"})
        with scripted(moved) as (url, _), pytest.raises(Refused, match="307"):
            ask(url, api_key=KEY)
        assert stolen == []


def test_nothing_is_taken_from_the_environment(monkeypatch, tmp_path):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password hidden\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with scripted(Reply()) as (url, asked):
        ask(url, retries=0)
    assert "authorization" not in asked[0].headers


def test_an_answer_that_cannot_be_unpacked_is_not_of_this_api():
    broken = Reply(body=b"not gzip", headers={"Content-Encoding": "gzip"})
    with scripted(broken) as (url, asked), pytest.raises(AnswerInvalid):
        ask(url)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "localhost",
        "ftp://host",
        "http://",
        "http://a:b@host",
        "http://host:port",
        7,
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url):
    with pytest.raises(ConfigInvalid):
        Connection(url, api_key=None, deadline_s=1, retries=0, transport=None)


@pytest.mark.parametrize("key", ["", "a b", "a\r\nX: y", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key):
    with pytest.raises(ConfigInvalid) as caught:
        Connection("http://host", api_key=key, deadline_s=1, retries=0, transport=None)
    assert not key or key not in str(caught.value)
