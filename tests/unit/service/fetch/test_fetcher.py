"""Fetching from a real host on loopback, a good one or a bad one."""

import asyncio
import gzip
import os
import resource
import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest

from mlcd.errors import ImageRejected, Overloaded, TooManyOpenFiles
from mlcd.service.fetch.fetcher import Fetcher
from mlcd.service.fetch.image_url import ImageUrl
from mlcd.service.settings import Fetch, Limits
from tests.image_host import ImageHost, endless, ok, redirect, status
from tests.unit.service.engines import new_metrics, run, sample, until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LOOPBACK = {"allow": ["127.0.0.1", "localhost"], "networks": ["127.0.0.0/8", "::1/128"]}
LOOPBACK |= {"timeout_s": 5}


def new_fetcher(*hosts, metrics=None, limits=None, **settings):
    given = LOOPBACK | {"ports": [host.port for host in hosts]} | settings
    return Fetcher(Fetch(**given), limits or Limits(), metrics or new_metrics())


async def outcomes(fetcher, *urls):
    """Returns the result of each URL: the bytes, or the rejection."""
    given = fetcher.screen([ImageUrl(url) if isinstance(url, str) else url for url in urls])
    async with fetcher.fetch(given, deadline=asyncio.get_running_loop().time() + 15) as found:
        return found


def fetch(host, *paths, **options):
    async def scenario():
        async with new_fetcher(host, **options) as fetcher:
            return await outcomes(fetcher, *[host.url + path for path in paths])

    return run(scenario())


def reason(host, path="/", **options):
    (found,) = fetch(host, path, **options)
    assert isinstance(found, ImageRejected), found
    assert "SECRET" not in str(found)
    return found.reason


def serving(**answers):
    return ImageHost({f"/{name}": answer for name, answer in answers.items()})


def test_an_image_comes_as_its_bytes_and_nothing_of_ours_goes_out():
    cookie = ok(b"\x89PNG", set_cookie="a=1")
    with serving(
        a=cookie, b=ok(b"raw", "application/octet-stream"), c=ok(b"", "IMAGE/JPEG; x=y")
    ) as host:
        assert fetch(host, "/a", "/b", "/c") == [b"\x89PNG", b"raw", b""]
        assert fetch(host, "/a?x=1", "/a") != []
        for _, headers in host.asked:
            assert headers == {
                "host": f"127.0.0.1:{host.port}",
                "user-agent": "mlcd",
                "accept": "image/*",
                "accept-encoding": "identity",
            }


def test_one_connection_serves_several_images():
    with serving(a=ok(b"x")) as host:
        ports = set()
        host.answers["/a"] = lambda connection: (
            ports.add(connection.getpeername()),
            connection.sendall(ok(b"x")),
        )
        assert fetch(host, *["/a"] * 10, max_connections_per_host=1) == [b"x"] * 10
        assert len(ports) == 1


@pytest.mark.parametrize(
    "answer",
    [
        *[status(code) for code in (201, 204, 206, 304, 400, 401, 404, 500, 503)],
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
        ok(b"<html>SECRET", "text/html"),
        ok(b"SECRET", "application/json"),
        ok(b"SECRET", content_type=None),
        ok(b"SECRET", "imagery/png"),
        ok(gzip.compress(b"SECRET" * 10**6), content_encoding="gzip"),
        ok(b"SECRET", content_encoding="br"),
        b"SSH-2.0-OpenSSH_9.2 SECRET\r\n",
        b"\x00" * 1000,
        b"HTTP/1.1 200 OK\r\nSECRET\r\n\r\n",
        HEAD + b"Content-Length: SECRET\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n123456",
        HEAD + b"Content-Length: -1\r\n\r\n",
        CHUNKED + b"SECRET\r\n",
        HEAD + b"X: " + b"SECRET" * 50_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_plain_image_is_refused_without_a_word_of_it(answer):
    def once(connection):
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_RDWR)

    with ImageHost({"/": once}) as host:
        assert reason(host) == "fetch-failed"


def test_compressed_bytes_are_never_unpacked():
    bomb = gzip.compress(bytes(10**7))
    with ImageHost({"/": ok(bomb)}) as host:
        assert fetch(host, "/") == [bomb]


def test_a_length_that_lies_is_not_believed():
    def short(connection):
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n" + b"x" * 50)
        connection.shutdown(socket.SHUT_RDWR)

    with ImageHost(
        {"/short": short, "/long": HEAD + b"Content-Length: 5\r\n\r\n" + b"y" * 10**5}
    ) as host:
        assert reason(host, "/short") == "fetch-failed"
        assert fetch(host, "/long") == [b"yyyyy"]


def test_too_many_bytes_are_given_up_as_soon_as_they_are_known():
    small = Limits(max_body_bytes=10**6)
    sent = []

    def stated(connection):
        connection.sendall(HEAD + b"Content-Length: 1000001\r\n\r\n")
        sent.append(connection.recv(1))

    with ImageHost(
        {
            "/stated": stated,
            "/chunks": endless(CHUNKED, b"2000\r\n" + b"x" * 0x2000 + b"\r\n"),
            "/unstated": endless(HEAD + b"\r\n", b"x" * 0x2000),
            "/just": ok(b"x" * 10**6),
        }
    ) as host:
        assert [
            reason(host, path, limits=small) for path in ("/stated", "/chunks", "/unstated")
        ] == ["too-many-bytes"] * 3
        assert sent == [b""]
        assert len(fetch(host, "/just", limits=small)[0]) == 10**6


def test_the_images_of_one_request_count_together():
    with ImageHost({"/": ok(b"x" * 400_000)}) as host:
        found = fetch(host, *["/"] * 4, limits=Limits(max_body_bytes=10**6))
        assert [getattr(image, "reason", None) for image in found].count("too-many-bytes") == 2


def test_what_a_failed_image_took_is_there_for_the_others():
    failed = threading.Event()

    def broken(connection):
        connection.sendall(HEAD + b"Content-Length: 700000\r\n\r\n" + b"x" * 600_000)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""  # the client has given up
        failed.set()

    def good(connection):
        assert failed.wait(20)
        connection.sendall(ok(b"x" * 600_000))

    with ImageHost({"/broken": broken, "/good": good}) as host:
        bad, image = fetch(
            host, "/broken", "/good", limits=Limits(max_body_bytes=10**6), timeout_s=15
        )
        assert (bad.reason, len(image)) == ("fetch-failed", 600_000)


@pytest.mark.parametrize(
    "answer",
    [
        endless(b"", b"", pause_s=1),
        endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", pause_s=0.1),
        endless(CHUNKED, b"1\r\nx\r\n", pause_s=0.1),
        endless(HEAD + b"Content-Length: 100000\r\n\r\n", b"x", pause_s=0.1),
        endless(HEAD + b"\r\n", b"x", pause_s=0.1),
    ],
)
def test_a_slow_host_costs_the_time_allowed_and_no_more(answer):
    with ImageHost({"/": answer, "/good": ok(b"x")}) as host:
        started = time.monotonic()
        slow, good = fetch(host, "/", "/good", timeout_s=0.5)
        assert (slow.reason, good) == ("fetch-late", b"x")
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 200),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 500),
        (CHUNKED, b"1\r\nx\r\n" * 500),
        (CHUNKED, b"00000000000000001;" + b"a" * 1000 + b"\r\nx\r\n"),
        (CHUNKED + b"0\r\n", b"X: y\r\n" * 500),
    ],
)
async def test_framing_without_an_image_behind_it_is_given_up_and_holds_nobody_up(head, piece):
    with ImageHost({"/": endless(head, piece)}) as host:
        late = []

        async def watch():
            while True:
                due = time.monotonic() + 0.01
                await asyncio.sleep(0.01)
                late.append(time.monotonic() - due)

        watcher = asyncio.create_task(watch())
        async with new_fetcher(host, timeout_s=15) as fetcher:
            (found,) = await outcomes(fetcher, host.url + "/")
        watcher.cancel()
        found, late_s = (found.reason, max(late, default=0.0))
        assert found == "fetch-failed"
        assert late_s < 3


def test_redirects_are_followed_so_far():
    with ImageHost(
        {
            "/loop": redirect("/loop"),
            **{f"/{code}": redirect("/3", code) for code in (301, 302, 303, 307, 308)},
            "/3": redirect("4?x"),
            "/4?x": redirect("/5"),
            "/5": ok(b"x"),
        }
    ) as host:
        assert fetch(host, *[f"/{code}" for code in (301, 302, 303, 307, 308)]) == [b"x"] * 5
        assert reason(host, "/301", max_redirects=2) == "fetch-failed"
        assert reason(host, "/3", max_redirects=0) == "fetch-failed"
        host.asked.clear()
        assert reason(host, "/loop") == "fetch-failed"
        assert host.paths == ["/loop"] * 4


def test_a_host_that_is_not_there_fails():
    with ImageHost({}) as host:
        closed = socket.create_server(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        closed.close()
        host.url = f"http://127.0.0.1:{port}"
        assert reason(host, ports=[port]) == "fetch-failed"


def test_the_next_address_of_a_host_is_tried(monkeypatch):
    addresses = ["::1", "127.0.0.2", "127.0.0.1"]  # the host listens on the last
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with ImageHost({"/": ok(b"x")}) as host:
        host.url = f"http://localhost:{host.port}"
        assert fetch(host, "/") == [b"x"]


def test_so_many_at_a_time_of_a_host_and_in_all():
    def slowly(connection):
        time.sleep(0.02)
        connection.sendall(ok(b"x"))

    with ImageHost({"/": slowly}) as host:
        assert fetch(host, *["/"] * 20, max_connections_per_host=3) == [b"x"] * 20
        assert host.most == 3
        host.most = 0
        assert fetch(host, *["/"] * 20, max_connections=2) == [b"x"] * 20
        assert host.most == 2


async def test_a_slow_name_server_holds_nobody_up(monkeypatch):
    resolve = socket.getaddrinfo

    def slowly(host, *arguments, **options):
        if host == "localhost":
            time.sleep(1.5)
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    with ImageHost({"/": ok(b"x")}) as host:
        async with new_fetcher(host, timeout_s=0.5) as fetcher:
            slow, good = await outcomes(fetcher, f"http://localhost:{host.port}/", host.url + "/")
            assert (slow.reason, good) == ("fetch-late", b"x")


@pytest.mark.parametrize("name", ["slow.example", "{}.slow.example"])
async def test_look_ups_that_nobody_waits_for_any_more_hold_no_other_domain_up(name):
    """Whatever came of who asked: a look-up ends when the system's resolver says so."""
    answered = threading.Event()

    def look_up(host, _):
        if host.endswith("slow.example"):
            answered.wait(10)
        return ["127.0.0.1"]

    with ImageHost({"/": ok(b"x")}) as host:
        given = {"allow": ["*.slow.example", "slow.example", "good.example"], "ports": [host.port]}
        given |= {"max_connections": 4, "max_connections_per_host": 4}
        settings = Fetch(**LOOPBACK | given)
        async with Fetcher(settings, Limits(), new_metrics(), look_up=look_up) as fetcher:

            def ask(host_name):
                return asyncio.create_task(outcomes(fetcher, f"http://{host_name}:{host.port}/"))

            for i in range(12):
                gone = ask(name.format(i))
                await asyncio.sleep(0.01)
                gone.cancel()
                await asyncio.wait([gone])
            assert await ask("good.example") == [b"x"]
            waiting = ask(name.format(0))
            await asyncio.sleep(0.01)
            answered.set()
            assert await waiting == [b"x"]


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
async def test_a_lack_of_descriptors_is_not_said_to_be_the_fault_of_the_host(name):
    """Neither when its name is looked up, nor when it is connected to."""
    with ImageHost({"/": ok(b"x")}) as host:
        url = f"http://{name}:{host.port}/"
        async with new_fetcher(host) as fetcher:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            try:
                with pytest.raises(TooManyOpenFiles, match="ulimit -n"):
                    await outcomes(fetcher, url)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert await outcomes(fetcher, url) == [b"x"]


@pytest.mark.parametrize("num_domains", [1, 4])
@pytest.mark.parametrize("slow", ["names", "hosts"])
async def test_many_names_of_a_slow_domain_hold_no_other_domain_up(num_domains, slow):
    """Slow are its name servers, or what its names lead to."""
    done = threading.Event()

    def look_up(host, _):
        if slow == "names" and host.endswith(".test"):
            done.wait(30)
        return ["127.0.0.1"]

    with ImageHost({"/": ok(b"x"), "/slow": lambda _: host.wait()}) as host:
        given = LOOPBACK | {"allow": ["*.test", "good.example"], "ports": [host.port]}
        settings = Fetch(**given)
        async with Fetcher(settings, Limits(), new_metrics(), look_up=look_up) as fetcher:
            names = [f"n{i}.slow{i % num_domains}.test" for i in range(40)]
            waiting = asyncio.create_task(
                outcomes(fetcher, *[f"http://{name}:{host.port}/slow" for name in names])
            )
            await asyncio.sleep(0.2)
            started = time.monotonic()
            found = await outcomes(fetcher, *[f"http://good.example:{host.port}/"] * 8)
            took_s = time.monotonic() - started
            assert not waiting.done()
            waiting.cancel()
            done.set()
    assert found == [b"x"] * 8
    assert took_s < 1


async def test_the_server_fetches_only_so_much_and_gives_all_of_it_back():
    limits = Limits(max_body_bytes=10**6, max_queued_bytes=10**6, max_images=8, max_queued_images=8)
    begun = threading.Event()

    def stalled(connection):
        connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 1000)
        begun.set()
        host.wait()

    def after_it(connection):
        assert begun.wait(20)
        connection.sendall(ok(b"x" * 400_000))

    answers = {"/": ok(b"x" * 400_000), "/slow": lambda _: host.wait(), "/stalled": stalled}
    answers |= {"/after": after_it}
    with ImageHost(answers) as host:
        metrics = new_metrics()
        async with new_fetcher(host, limits=limits, metrics=metrics) as fetcher:
            now = asyncio.get_running_loop().time()
            urls = fetcher.screen([ImageUrl(host.url + "/")] * 2)
            async with fetcher.fetch(urls, deadline=now + 10) as found:
                assert len(found[1]) == 400_000
                with pytest.raises(Overloaded):
                    await outcomes(fetcher, host.url + "/stalled", host.url + "/after")
                assert sample(metrics, 'mlcd_held{of="fetched_bytes"}') == 800_000
            assert len((await outcomes(fetcher, host.url + "/"))[0]) == 400_000

            host.most = 0
            waiting = asyncio.create_task(outcomes(fetcher, *[host.url + "/slow"] * 5))
            await until(lambda: host.most)
            with pytest.raises(Overloaded):
                await outcomes(fetcher, *[host.url + "/"] * 4)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await outcomes(fetcher, *[host.url + "/absent"] * 8)
            assert sample(metrics, 'mlcd_held{of="fetched_bytes"}') == 0
        assert {
            outcome: sample(metrics, f'mlcd_fetch_duration_seconds_count{{outcome="{outcome}"}}')
            for outcome in ("fetched", "overloaded", "cancelled", "fetch-failed")
        } == {"fetched": 3, "overloaded": 1, "cancelled": 6, "fetch-failed": 8}


async def test_the_deadline_of_the_request_ends_it_earlier():
    with ImageHost({"/": lambda _: host.wait()}) as host:
        async with new_fetcher(host) as fetcher:
            given = fetcher.screen([ImageUrl(host.url + "/")])
            started = asyncio.get_running_loop().time()
            async with fetcher.fetch(given, deadline=started + 0.2) as (image,):
                elapsed_s = asyncio.get_running_loop().time() - started
        assert image.reason == "fetch-late"
        assert elapsed_s < 3


async def test_what_is_no_url_passes_through_in_its_place():
    rejected = ImageRejected("empty", "…")
    with ImageHost({"/": ok(b"x")}) as host:
        async with new_fetcher(host) as fetcher:
            assert await outcomes(
                fetcher, b"a", host.url + "/", rejected, host.url + "/", b"b"
            ) == [b"a", b"x", rejected, b"x", b"b"]


async def test_it_is_off_unless_hosts_are_listed():
    with ImageHost({"/": ok(b"x")}) as host:
        async with new_fetcher(host, allow=[]) as fetcher:
            found = await outcomes(fetcher, host.url + "/", "http://[", b"a")
        for refused in found[:2]:
            assert refused.reason == "unreadable"
            assert "fetching URLs is off" in str(refused)
            assert "MLCD_FETCH__ALLOW" in str(refused)
        assert found[2] == b"a"
        assert host.asked == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of good.example, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    key, path = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=good.example -addext subjectAltName=DNS:good.example"
    command = [*command.split(), "-keyout", key, "-out", path]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    return path, context


def test_tls_is_spoken_with_the_name_and_not_with_the_address(certificate, monkeypatch):
    path, context = certificate
    named = []
    context.sni_callback = lambda _, name, __: named.append(name)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    with ImageHost({"/": ok(b"x"), "/down": redirect("http://good.example/")}, tls=context) as host:

        def ask(name, path="/"):
            host.url = f"https://{name}:{host.port}"
            (image,) = fetch(
                host, path, allow=["*.example"], networks=["127.0.0.0/8"], ports=[host.port, 80]
            )
            return image

        assert ask("good.example").reason == "fetch-failed"  # signed by nobody known
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        assert ask("good.example") == b"x"
        assert named == ["good.example"] * 2
        assert host.asked[0][1]["host"] == f"good.example:{host.port}"
        assert ask("other.example").reason == "fetch-failed"
        assert "http" in str(ask("good.example", "/down"))
        assert host.paths == ["/", "/down"]
