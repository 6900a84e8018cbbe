"""A real server and its clients when the engine is killed, hangs or raises, or clients leave."""

import contextlib
import io
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.integration.running import Server, children, exists, serving, until

FLIP_S = 2.0


def png(color, side=8):
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), color).save(buffer, "PNG")
    return buffer.getvalue()


GRAY, WHITE = png((100, 100, 100)), png((255, 255, 255))


def ask(server, image=GRAY):
    return httpx.post(
        f"{server.url}/v1/images/embed",
        content=image,
        headers={"Content-Type": "image/png"},
        timeout=30,
    )


def request_head(length, path="/v1/images/embed"):
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: "
        f"{length}\r\n\r\n"
    )
    return head.encode()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def test_an_engine_that_is_killed_fails_its_waiters_and_is_back_within_seconds():
    with (
        serving("fake:latency_ms=400", engine="fake", max_batch=4) as server,
        ThreadPoolExecutor(10) as pool,
    ):
        killed = server.worker()
        waiting = [pool.submit(ask, server) for _ in range(10)]
        until(lambda: server.metric('mlcd_held{of="images"}') == 10, 5)
        time.sleep(0.1)
        os.kill(killed, signal.SIGKILL)
        assert until(lambda: not server.ready(), 5) < FLIP_S
        answers = [future.result(timeout=20) for future in waiting]
        statuses = [answer.status_code for answer in answers]
        # At the engine were two batches of at most four; the others were queued, for the next
        # engine.
        assert set(statuses) == {200, 503}
        assert 1 <= statuses.count(503) <= 8
        for answer in answers:
            if answer.status_code == 503:
                assert answer.headers["content-type"] == "application/problem+json"
                assert 1 <= int(answer.headers["retry-after"]) <= 30
        until(server.ready, 10)
        assert server.worker() not in (None, killed)
        assert ask(server).status_code == 200
        assert server.metric("mlcd_engine_restarts_total") == 1
        assert server.metric('mlcd_held{of="images"}') == 0


def test_an_engine_that_hangs_is_noticed_without_traffic_and_replaced():
    with serving("fake:latency_ms=5", engine="fake", batch_timeout_s=2) as server:
        hung = server.worker()
        os.kill(hung, signal.SIGSTOP)
        assert until(lambda: not server.ready(), 5) < FLIP_S
        until(server.ready, 15)
        assert server.worker() not in (None, hung)
        assert ask(server).status_code == 200


def test_an_engine_that_raises_is_not_ready_until_it_has_succeeded_again():
    with serving("fake:latency_ms=5,sick_s=2", engine="fake") as server:
        answer = ask(server, WHITE)
        assert (answer.status_code, "fails after a white image" in answer.text) == (503, False)
        assert until(lambda: not server.ready(), 5) < FLIP_S
        until(server.ready, 15)
        assert ask(server).status_code == 200


def leave_during_upload(server, photo):
    with connect(server) as client:
        client.sendall(request_head(len(photo)) + photo[: len(photo) // 2])
        time.sleep(0.05)


def leave_during_decoding(server, photo):
    with connect(server) as client:
        client.sendall(request_head(len(photo)) + photo)
        time.sleep(0.005)


def leave_during_inference(server, photo):
    with connect(server) as client:
        client.sendall(request_head(len(photo)) + photo)
        time.sleep(0.3)


def leave_while_reading(server, photo):
    with connect(server) as client:
        client.sendall(request_head(len(photo)) + photo)
        client.recv(10)


@pytest.mark.parametrize(
    "leave",
    [leave_during_upload, leave_during_decoding, leave_during_inference, leave_while_reading],
)
def test_clients_that_leave_ten_at_once_leave_nothing_behind(leaving_from, photo, leave):
    server = leaving_from
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda _: leave(server, photo), range(10)))
    until(
        lambda: (
            server.metric('mlcd_held{of="images"}') == server.metric('mlcd_held{of="bytes"}') == 0
        ),
        10,
    )
    started = time.monotonic()
    assert ask(server, photo).status_code == 200
    assert time.monotonic() - started < 5


@pytest.fixture(scope="module")
def leaving_from():
    with serving("fake:latency_ms=400", engine="fake", max_batch=4) as server:
        yield server


def test_memory_comes_back_after_large_requests(photo):
    picture = Image.fromarray(
        np.random.default_rng(0).integers(0, 255, (3000, 4000, 3), dtype=np.uint8)
    )
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=50)
    large = [("files", (f"{i}.jpg", buffer.getvalue(), "image/jpeg")) for i in range(8)]
    with serving("fake:latency_ms=5", engine="fake") as server:
        assert ask(server, photo).status_code == 200
        before = server.resident_mib()
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/images/embed", files=large, timeout=60)
            assert len(answer.json()["results"]) == 8
        # Without returning large blocks: 200 MiB and more.
        until(lambda: server.resident_mib() < before + 40, 5)


def test_the_end_is_bounded_and_a_second_signal_ends_at_once():
    for signals, least, most in (
        ([signal.SIGTERM], 1.0, 7.0),
        ([signal.SIGTERM, signal.SIGTERM], 0.0, 1.0),
    ):
        server = Server(
            "fake:latency_ms=1", engine="fake", drain_s=0, grace_s=1, batch_timeout_s=60
        ).wait_ready()
        worker = server.worker()
        os.kill(worker, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            never = pool.submit(ask, server)
            until(lambda server=server: server.metric('mlcd_held{of="images"}') == 1, 5)
            started = time.monotonic()
            for number in signals:
                server.process.send_signal(number)
                time.sleep(0.2)  # later than an echo
            server.process.communicate(timeout=15)
            assert least <= time.monotonic() - started < most
            with contextlib.suppress(httpx.TransportError):
                assert never.result(timeout=5).status_code >= 500
        until(lambda worker=worker: not exists(worker), 2)


def test_sigterm_is_heard_while_the_model_is_loaded():
    server = Server("fake:latency_ms=20000", engine="fake")
    until(lambda: server.worker() is not None, 20, server)
    worker = server.worker()
    started = time.monotonic()
    status, output = server.stop()
    assert (status, "Traceback" in output) == (0, False)
    assert time.monotonic() - started < 5
    until(lambda: not exists(worker), 2)


def test_sigterm_is_heard_while_weights_are_exported(journey, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = Server(journey / "run")
    # the engine's process waits for the model that another one exports
    until(lambda: len(children(server.process.pid)) > 1, 20, server)
    exporter = children(server.process.pid)
    time.sleep(
        0.5
    )  # in the moment of its start nobody knows it yet: it finishes alone, for the next who asks
    started = time.monotonic()
    status, output = server.stop()
    assert (status, output.count("\n"), output.startswith("mlcd: exporting ")) == (0, 1, True)
    assert time.monotonic() - started < 5
    until(lambda: not any(map(exists, exporter)), 2)
