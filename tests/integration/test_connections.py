"""Clients that are slow, wordy, many or wrong, on the wire: the server goes on answering others and
lets go of them.
"""

import contextlib
import http.client
import json
import re
import socket
import time
from pathlib import Path

import httpx
import pytest

from mlcd.service.http.connections import MAX_OVERHEAD_BYTES
from mlcd.service.timings import REQUEST_HEADERS_S
from tests.integration.running import serving, until

GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/images/embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
DEADLINE_S = 2
MANY = 40


@pytest.fixture(scope="module")
def server():
    limits = {"limits__deadline_s": DEADLINE_S, "limits__max_connections": MANY}
    with serving("fake:latency_ms=1", engine="fake", **limits) as running:
        yield running


@contextlib.contextmanager
def connected(server, *sent):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        for part in sent:
            client.sendall(part)
        yield client


def whole(client):
    """All that comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def statuses(answer):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def answers(server):
    """Seconds until somebody else is answered."""
    started = time.monotonic()
    assert httpx.get(f"{server.url}/health/live", timeout=5).status_code == 200
    return time.monotonic() - started


def test_the_slow_are_let_go_and_hold_up_nobody(server):
    """Each as slow as can be: silent, header by header, a body that trickles, one that nobody reads
    any more.
    """
    slow = {
        "silent": ([], b""),
        "header by header": ([b"GET /health/live HTTP/1.1\r\n"], b"a: b\r\n"),
        "after an answer": ([GET], b"G"),
        "a body that trickles": ([POST, b"Content-Length: 100000\r\n\r\n"], b"x"),
        "the rest of a refused body": (
            [b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"],
            b"x",
        ),
        "a chunk's extension": ([POST, b"Transfer-Encoding: chunked\r\n\r\n1;"], b"x"),
    }
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(deaf_client(server))
        clients = {
            name: stack.enter_context(connected(server, *sent)) for name, (sent, _) in slow.items()
        }
        started, closed, longest = time.monotonic(), {}, 0.0
        while len(closed) < len(slow) + 1:
            assert time.monotonic() - started < REQUEST_HEADERS_S + DEADLINE_S + 6, set(slow) - set(
                closed
            )
            if "deaf" not in closed and not kept(server, deaf):
                closed["deaf"] = time.monotonic() - started
            longest = max(longest, answers(server))
            for name, client in clients.items():
                if name not in closed and not alive(client, slow[name][1]):
                    closed[name] = time.monotonic() - started
            time.sleep(0.2)
    assert longest < 1
    assert closed["a body that trickles"] < DEADLINE_S + 2
    assert closed["silent"] < REQUEST_HEADERS_S + 2
    until(lambda: server.metric('mlcd_held{of="bytes"}') == 0, 5)


@contextlib.contextmanager
def deaf_client(server):
    """It asks until the kernel holds no more of its answers, and reads none."""
    answered = 'mlcd_requests_total{route="other",status="200"}'
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        before, num = server.metric(answered), 0
        while num == server.metric(answered) - before:
            client.sendall(4 * b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            num += 4
            with contextlib.suppress(AssertionError):
                until(lambda num=num: server.metric(answered) - before >= num, 2)
        yield client


def kept(server, client):
    """Tells if the server's end is open.

    The client's end cannot know, when more data is before it than it takes.
    """
    ends = f":{server.port:04X}", f":{client.getsockname()[1]:04X}"
    with Path("/proc/net/tcp").open() as connections:
        found = [line.split()[1:4] for line in connections.readlines()[1:]]
    return any((local[-5:], remote[-5:], state) == (*ends, "01") for local, remote, state in found)


def alive(client, more):
    """Tells if the server still listens, after `more`."""
    client.setblocking(False)
    try:
        while client.recv(2**16):
            pass
    except BlockingIOError:
        with contextlib.suppress(BlockingIOError):
            client.send(more)
        return True
    except OSError:
        return False
    return False


def test_a_trickling_body_is_told_so(server):
    with connected(server, POST, b"Content-Length: 1000\r\n\r\nx") as client:
        answer = whole(client)
    assert statuses(answer) == [504]
    assert (
        json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == "urn:mlcd:problem:deadline-exceeded"
    )


def test_more_connections_than_there_may_be_close_those_that_wait_longest(server):
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(3 * MANY)]
        assert answers(server) < 1
        until(lambda: sum(alive(client, b"") for client in idle) <= MANY, 5)
        assert alive(idle[-1], b"")
    assert answers(server) < 1


HUGE = b"x" * 2**20
LINE = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 300
# What is sent, and the status of the refusal where it has to be that one.
WRONG = {
    "a huge header": (b"GET /health/live HTTP/1.1\r\na: " + HUGE, 431),
    "a huge path": (b"GET /" + HUGE, 431),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2**17, 431),
    "chunks of a byte": (CHUNKED + b"1\r\nx\r\n" * 2**17, None),
    "a chunk's huge extension": (CHUNKED + b"1;" + HUGE, None),
    "many trailers": (CHUNKED + b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * 2**17, None),
    "pipelined without end": (GET * 2**12, None),
    "connect": (b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", None),
    "star": (b"GET * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", None),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", None),
    "tls": (TLS, 400),
    "a path that is no ASCII": (LINE.replace(b"/ ", b"/\xff\xfe ") + b"\r\n", 400),
    "a negative length": (LINE + b"Content-Length: -1\r\n\r\n", 400),
    "2**100": (LINE + b"Content-Length: 9" + b"9" * 30 + b"\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400),
    "smuggling": (CHUNKED.replace(b"T", b"Content-Length: 4\r\nT", 1) + b"0\r\n\r\n", 400),
    "a negative chunk": (CHUNKED + b"-1\r\n", None),
    "a chunk of 2**72": (CHUNKED + b"ffffffffffffffffff\r\n", None),
    "a header with a zero": (b"GET / HTTP/1.1\r\na\0b: c\r\n\r\n", 400),
    "websocket": (LINE + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_http_or_too_much_of_it_is_refused(server, name):
    sent, status = WRONG[name]
    with connected(server) as client:
        with contextlib.suppress(OSError):  # the server may have closed before all is sent
            client.sendall(sent)
        client.settimeout(REQUEST_HEADERS_S + 5)
        answer = whole(client)
    assert all(each < 500 for each in statuses(answer))
    assert status is None or statuses(answer) in ([status], [])  # a reset may overtake the answer
    assert len(answer) < 2**20
    assert b"Traceback" not in answer
    assert answers(server) < 1


def test_a_refusal_of_headers_arrives(server):
    with connected(server, b"GET / HTTP/1.1\r\na: " + b"x" * (MAX_OVERHEAD_BYTES + 1)) as client:
        assert statuses(whole(client)) == [431]


def test_a_body_longer_than_it_says_is_the_next_request(server, photo):
    with connected(
        server,
        POST,
        f"Content-Length: {len(photo)}\r\n\r\n".encode() + photo + b"\x00no request\r\n\r\n",
    ) as client:
        assert statuses(whole(client)) in ([200, 400], [400])


def test_a_few_pipelined_requests_are_answered_in_order(server):
    paths = [b"/health/live", b"/nothing", b"/v1/models", b"/health/live"]
    lines = [b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in paths]
    lines[-1] = lines[-1].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with connected(server, b"".join(lines)) as client:
        assert statuses(whole(client)) == [200, 404, 200, 200]


def test_very_many_pipelined_requests_are_cut(server):
    with connected(server, 2000 * GET) as client:
        assert len(statuses(whole(client))) < 100


def test_http_1_0_is_answered_and_closed(server):
    with connected(server, b"GET /v1/models HTTP/1.0\r\n\r\n") as client:
        assert statuses(whole(client)) == [200]


def test_an_honest_chunked_body_is_taken(server, photo):
    """In pieces of 100 bytes, which is more framing than there are headers."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    pieces = [photo[start : start + 100] for start in range(0, len(photo), 100)]
    kind = {"Content-Type": "image/jpeg"}
    client.request("POST", "/v1/images/embed", iter(pieces), kind, encode_chunked=True)
    assert client.getresponse().status == 200
    client.close()


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
@pytest.mark.parametrize("kind", [b"text/html", b"image/jpeg"])
def test_a_refusal_is_read_by_a_client_that_sends_all_of_its_body_first(server, close, kind):
    """415, and 413 by the stated length: neither is lost in a reset of the connection."""
    num = 100_000_000
    head = POST.replace(b"image/jpeg", kind) + close + b"Content-Length: %d\r\n\r\n" % num
    with connected(server, head) as client:
        for _ in range(num // 1_000_000):
            client.sendall(b"x" * 1_000_000)
        assert client.recv(2**16).startswith(
            b"HTTP/1.1 413 " if kind == b"image/jpeg" else b"HTTP/1.1 415 "
        )


def test_a_client_that_goes_on_after_the_end_is_let_go(server):
    head = (
        POST.replace(b"image/jpeg", b"text/html")
        + b"Connection: close\r\nContent-Length: 1000000\r\n\r\n"
    )
    with connected(server, head) as client:
        assert statuses(client.recv(2**16)) == [415]
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(b"x" * 1_000_000 + GET * 3)
        assert statuses(whole(client)) == []
    assert answers(server) < 5


def test_where_a_route_is_does_not_depend_on_what_the_client_calls_the_server(server):
    with connected(
        server, b"GET /v1/info/ HTTP/1.1\r\nHost: 127.0.0.9:1\r\nConnection: close\r\n\r\n"
    ) as client:
        answer = whole(client)
    assert statuses(answer) == [404]
    assert b"127.0.0.9" not in answer


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"", 400),
        (b"Host: localhost\r\nHost: localhost\r\n", 400),
        (b"Host: localhost\r\n", 200),
        (b"Host:\r\n", 421),
    ],
    ids=["none", "two", "one", "empty"],
)
def test_http_1_1_needs_one_host(server, lines, status):
    """RFC 9112, 3.2."""
    with connected(
        server, b"GET /health/live HTTP/1.1\r\n" + lines + b"Connection: close\r\n\r\n"
    ) as client:
        assert statuses(whole(client)) == [status]


def test_head_is_get_without_a_body(server):
    """Load balancers probe so."""
    for path in ("/health/live", "/health/ready", "/v2/health/ready", "/v1/info", "/metrics", "/"):
        answer = httpx.head(f"{server.url}{path}")
        assert (answer.status_code, answer.content) == (200, b""), path
        found = answer.headers["content-type"]
        assert found == httpx.get(f"{server.url}{path}").headers["content-type"]
    assert httpx.head(f"{server.url}/v1/labels").status_code == 405
    assert httpx.head(f"{server.url}/nowhere").status_code == 404
    assert server.metric('mlcd_requests_total{route="/v1/info",status="200"}') >= 2


def test_a_refused_body_that_was_never_sent_ends_the_connection(server):
    """Else the next request would be taken for the body."""
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
    started = time.monotonic()
    with connected(server, head + b"Expect: 100-continue\r\n\r\n") as client:
        answer = whole(client)
    assert statuses(answer) == [404]
    assert b"connection: close" in answer.lower()
    assert time.monotonic() - started < 5
