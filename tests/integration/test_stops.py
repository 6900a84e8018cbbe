"""Signals to every process of a server or worker, as systemd sends them, a terminal or `timeout`:
nothing is lost.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.integration.running import Server, children, exists, until

NUM_CLIENTS = 24


def family(pid):
    """The process and all below it, the last first: an engine hears of a signal before its server
    does.
    """
    return [*(other for child in children(pid) for other in family(child)), pid]


def send_all(pids, *numbers):
    for pid in pids:
        for number in numbers:
            os.kill(pid, number)


@pytest.fixture
def start():
    """Start servers of a slow engine; whatever is left of them is killed."""
    servers = []

    def start(processes, **settings):
        server = Server("fake:latency_ms=100", engine="fake", processes=processes, **settings)
        servers.append(server)
        server.wait_ready()
        counts = ("mlcd_processes", "mlcd_engine_up")
        if processes > 1:
            until(lambda: [*map(server.metric, counts)] == [processes] * 2, 30, server)
        return server

    yield start
    for server in servers:
        left = family(server.process.pid) if server.process.poll() is None else []
        for pid in filter(exists, left):
            os.kill(pid, signal.SIGKILL)
        server.process.communicate()


@pytest.mark.parametrize(
    ("processes", "numbers"),
    [
        (1, [signal.SIGINT, signal.SIGTERM]),
        pytest.param(1, [signal.SIGTERM] * 2, marks=pytest.mark.slow),
        pytest.param(2, [signal.SIGINT, signal.SIGTERM], marks=pytest.mark.slow),
        (2, [signal.SIGTERM] * 2),
    ],
)
def test_a_signal_to_every_process_loses_no_request(start, photo, processes, numbers):
    server = start(processes, drain_s=2)
    everybody = family(server.process.pid)
    assert len(everybody) == (2 if processes == 1 else 5)
    enough = threading.Event()

    def ask_on():
        statuses = []
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not enough.is_set():
                answer = client.post(
                    "/v1/images/embed", content=photo, headers={"Content-Type": "image/png"}
                )
                statuses.append(answer.status_code)
        return statuses

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        asking = [pool.submit(ask_on) for _ in range(NUM_CLIENTS)]
        until(lambda: server.metric('mlcd_held{of="images"}') > NUM_CLIENTS / 2, 10, server)
        send_all(everybody, *numbers)
        started = time.monotonic()
        until(lambda: not server.ready(), 2)
        time.sleep(0.5)  # a balancer that has not noticed yet
        enough.set()
        statuses = [status for future in asking for status in future.result(timeout=30)]
        output, _ = server.process.communicate(timeout=15)
    assert set(statuses) == {200}
    assert len(statuses) > NUM_CLIENTS
    found = (server.process.returncode, "Traceback" in output, "ended with status" in output)
    assert found == (0, False, False)
    assert time.monotonic() - started < 15  # drain, grace and margin are 13 s
    until(lambda: not any(map(exists, everybody)), 2)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_signal_to_every_process_that_is_just_beginning_is_no_failure(processes):
    """At moments in which some of them cannot have said yet which signals they hear."""
    for after_s in (0.0, 0.05, 0.2, 0.6):
        server = Server("fake:latency_ms=200", engine="fake", processes=processes)
        until(lambda pid=server.process.pid: children(pid), 30, server)
        time.sleep(after_s)
        everybody = family(server.process.pid)
        send_all(everybody, signal.SIGTERM)
        output, _ = server.process.communicate(timeout=20)
        assert (server.process.returncode, output) == (0, "") or "serving" in output, output
        until(lambda everybody=everybody: not any(map(exists, everybody)), 5)


def test_a_signal_to_one_server_process_is_its_supervisors_to_give(start, photo):
    server = start(2)
    first, second = children(server.process.pid)
    send_all([first, *children(first)], signal.SIGTERM, signal.SIGINT)
    time.sleep(0.5)
    answer = httpx.post(
        f"{server.url}/v1/images/embed", content=photo, headers={"Content-Type": "image/png"}
    )
    assert answer.status_code == 200
    assert children(server.process.pid) == [first, second]
    os.kill(first, signal.SIGUSR1)
    until(lambda: len({*children(server.process.pid)} - {first, second}) == 1, 20, server)
    status, output = server.stop()
    assert status == 0
    assert "server process 0 ended with status 0; the next starts in" in output
