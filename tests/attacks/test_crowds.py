"""More connections than there may be, each of them at work on something: probes are answered all
the same.
"""

import contextlib
import time

import httpx
import pytest

from tests.attacks.conftest import connections, image_head, request_head
from tests.conftest import write_digits
from tests.integration.running import serving, until

MOST = 60  # few enough that all have come before the first has lost its patience
NUM = MOST + 40
STREAMS = 20


@pytest.fixture(scope="module")
def crowded(tokens, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_digits(root / "in", 2)
    limits = {"limits__max_connections": MOST, "limits__max_streams": STREAMS}
    state = tmp_path_factory.mktemp("state")
    settings = {"auth__keys_file": tokens[0], "jobs__roots": root, "state_dir": state, **limits}
    with serving("fake:latency_ms=1", engine="fake", **settings) as server:
        server.root = root
        yield server


def probes(server, num=20):
    """How many of so many probes are answered, each on a connection of its own, as
    balancers ask.
    """
    answered = 0
    for _ in range(num):
        with contextlib.suppress(httpx.TransportError):
            answered += httpx.get(f"{server.url}/health/live", timeout=10).status_code == 200
        time.sleep(0.02)
    return answered


def trickle(clients):
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(b"x")


def test_bodies_that_are_refused_and_trickle_keep_no_probe_out(crowded):
    """No key at all: the answer is 401 at once, and the body goes on for ever."""
    with connections(crowded, NUM, image_head(1_000_000) + b"x") as clients:
        for _ in range(3):
            trickle(clients)
            assert probes(crowded) == 20
            # Answered already, they are the first to go: somebody else's request is served, too.
            assert httpx.get(f"{crowded.url}/v1/info", timeout=2).status_code == 401


def test_clients_that_do_not_read_their_answers_keep_no_probe_out(crowded):
    with connections(crowded, NUM, 15 * request_head("GET", "/openapi.json")):
        assert probes(crowded) == 20


def test_bodies_that_are_read_and_trickle_keep_no_probe_out(crowded, tokens):
    """With a key: they are at work, as far as the server can tell, until their patience is over."""
    head = image_head(1_000_000, tokens[1])
    with contextlib.ExitStack() as crowd:
        crowd.enter_context(connections(crowded, NUM, head + b"x"))

        def full():
            # Some places are those of a crowd before, or of one that has been refused just now.
            crowd.enter_context(connections(crowded, 1, head + b"x"))
            return httpx.get(f"{crowded.url}/v1/info", timeout=2).status_code == 503

        until(full, 4)
        assert probes(crowded) == 20
        until(lambda: httpx.get(f"{crowded.url}/v1/info", timeout=2).status_code == 401, 10)


def test_streams_of_events_keep_no_probe_out_and_are_bounded(crowded, tokens):
    headers = {"Authorization": f"Bearer {tokens[2]}"}
    body = {"kind": "embed", "input": str(crowded.root / "in"), "output": str(crowded.root / "out")}
    job = httpx.post(f"{crowded.url}/v1/jobs", json=body, headers=headers).json()
    path = f"/v1/jobs/{job['id']}/events"
    with connections(crowded, NUM, request_head("GET", path, token=tokens[1])):
        until(lambda: crowded.metric('mlcd_held{of="streams"}') == STREAMS, 10)
        assert probes(crowded) == 20
        refused = httpx.get(crowded.url + path, headers=headers, timeout=5)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert httpx.get(f"{crowded.url}/v1/jobs", headers=headers, timeout=5).status_code == 200
    until(lambda: crowded.metric('mlcd_held{of="streams"}') == 0, 10)


def test_connections_leave_descriptors_for_all_else(photo):
    """With a low limit on open files, idle connections took every one of them."""
    with (
        serving("fake:latency_ms=1", engine="fake", files=128) as server,
        connections(server, 200, b"G"),
    ):
        assert probes(server) == 20
        answer = httpx.post(f"{server.url}/v1/images/embed", files={"files": photo}, timeout=10)
        assert answer.status_code == 200
