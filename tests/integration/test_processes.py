"""Several server processes on one port: what they share, and what becomes of it when one or all of
them end.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict

import httpx
import pytest

from mlcd.service.serve.server import Order, SettingsSources
from tests.integration.running import Server, children, exists, until


@pytest.fixture
def started():
    """Start servers of two processes; whatever is left of them is killed."""
    servers = []

    def start(model="fake:latency_ms=5", engine="fake", **settings):
        server = Server(model, engine=engine, processes=2, log__format="json", **settings)
        servers.append(server)
        return server

    yield start
    for server in servers:
        left = [pid for child in children(server.process.pid) for pid in (child, *children(child))]
        server.process.kill()
        server.process.communicate()
        for pid in filter(exists, left):
            os.kill(pid, signal.SIGKILL)


def all_up(server):
    server.wait_ready()
    until(
        lambda: server.metric("mlcd_processes") == server.metric("mlcd_engine_up") == 2, 30, server
    )
    return server


def ask(server, image):
    return httpx.post(
        f"{server.url}/v1/images/embed",
        content=image,
        headers={"Content-Type": "image/png"},
        timeout=30,
    )


def test_one_that_is_killed_is_replaced_while_the_other_serves(started, photo):
    server = all_up(started())
    first, second = children(server.process.pid)
    engine = children(first)
    os.kill(first, signal.SIGKILL)
    for _ in range(10):
        assert ask(server, photo).status_code == 200
    until(lambda: len(children(server.process.pid)) == 2, 10, server)
    assert second in children(server.process.pid)
    until(
        lambda: server.metric("mlcd_processes") == server.metric("mlcd_engine_up") == 2, 20, server
    )
    until(lambda: not any(map(exists, engine)), 5)
    status, output = server.stop()
    assert (status, "Traceback" in output) == (0, False)
    assert "server process 0 ended with status -9; the next starts in 0.0 s" in output


def test_a_terminal_that_is_closed_ends_no_process(started, photo):
    server = all_up(started())
    for process in (server.process.pid, *children(server.process.pid)):
        for pid in (process, *children(process)):
            os.kill(pid, signal.SIGHUP)
    time.sleep(0.5)
    assert ask(server, photo).status_code == 200
    assert server.metric("mlcd_processes") == server.metric("mlcd_engine_up") == 2
    assert server.stop()[0] == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_second_signal_ends_all_at_once(started, number):
    server = all_up(started("fake:latency_ms=1", drain_s=20))
    family = [pid for child in children(server.process.pid) for pid in (child, *children(child))]
    server.process.send_signal(number)
    time.sleep(0.3)
    assert server.process.poll() is None
    started_at = time.monotonic()
    server.process.send_signal(number)
    server.process.communicate(timeout=10)
    assert server.process.returncode == -number
    assert time.monotonic() - started_at < 3
    until(lambda: not any(map(exists, family)), 2)


def test_the_end_is_bounded_whatever_hangs(started):
    server = all_up(started(grace_s=0))
    family = children(server.process.pid)
    os.kill(family[0], signal.SIGSTOP)
    started_at = time.monotonic()
    server.process.terminate()
    server.process.communicate(timeout=15)
    assert server.process.returncode == 1
    assert time.monotonic() - started_at < 8  # the bound of a process, 3 s, and one more
    until(lambda: not any(map(exists, family)), 2)


def test_where_the_supervisor_is_killed_all_others_end(started):
    server = all_up(started())
    family = [pid for child in children(server.process.pid) for pid in (child, *children(child))]
    server.process.kill()
    server.process.wait()
    until(lambda: not any(map(exists, family)), 10)


@pytest.mark.slow
def test_one_that_cannot_start_again_is_tried_until_it_can(started, journey, tmp_path, photo):
    model = tmp_path / "model"
    shutil.copytree(journey / "model", model)
    server = all_up(started(model, engine="openvino"))
    first, second = children(server.process.pid)
    shutil.rmtree(model)
    os.kill(first, signal.SIGKILL)
    tried = set()

    def tried_twice():
        tried.update(children(server.process.pid))
        return len(tried - {first, second}) >= 2

    until(tried_twice, 40, server)
    assert {ask(server, photo).status_code for _ in range(10)} == {200}
    shutil.copytree(journey / "model", model)
    until(lambda: server.metric("mlcd_processes") == 2, 60, server)
    _, output = server.stop()
    assert "server process 0 cannot be started: the model" in output


def test_a_process_that_would_serve_something_else_does_not_serve(tmp_path):
    """Answers of one server never come from two models."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        source = SettingsSources({"model": "fake:latency_ms=1", "engine": "fake"}, None)
        order = Order(source, listener.fileno(), 0, str(tmp_path), identity="of another model")
        told = subprocess.run(
            [sys.executable, "-m", "mlcd.service.serve.server", str(os.getpid())],
            input=json.dumps(asdict(order)) + "\n",
            env=os.environ | {"MLCD_ENGINE": "fake"},
            pass_fds=(listener.fileno(),),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert told.returncode == 2
    message = json.loads(told.stdout)
    assert (message["error"], message["remedy"]) == ("ConfigInvalid", "restart the server")
