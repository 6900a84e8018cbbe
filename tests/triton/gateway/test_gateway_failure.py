"""What becomes of the gateway and its clients when Triton is killed, frozen, full or at another version."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.conftest import run_mlcd
from tests.integration.running import Server as Gateway
from tests.integration.running import serving, until
from tests.triton.conftest import SLOW_BATCH, SLOW_QUEUE, SLOW_S, flooded

pytestmark = pytest.mark.triton

FLIP_S = 2.0
BUSY_S = 120  # for a machine that others keep busy


def ask(server, image):
    return httpx.post(
        f"{server.url}/v1/images/embed",
        content=image,
        headers={"Content-Type": "image/png"},
        timeout=30,
    )


def served(server, image):
    """The embedding, for a client who asks again where an answer says that the machine is busy."""
    deadline = time.monotonic() + BUSY_S
    while (answer := ask(server, image)).status_code in (
        429,
        503,
        504,
    ) and time.monotonic() < deadline:
        time.sleep(int(answer.headers.get("retry-after", 1)))
    assert answer.status_code == 200, answer.text
    return answer.json()["results"][0]["embedding"]


def distinct(image, number):
    """The same picture by other bytes, so that no cache answers for Triton."""
    return image + number.to_bytes(2)


@pytest.fixture
def gateway(own_server):
    with serving(
        "tiny", engine="triton", triton__url=own_server.url, triton__timeout_s=3
    ) as running:
        yield running


def test_a_killed_triton_fails_at_once_and_is_used_again_when_it_is_back(
    gateway, own_server, picture
):
    _, image, _ = picture
    assert ask(gateway, image).status_code == 200
    own_server.kill()
    assert until(lambda: not gateway.ready(), 5) < FLIP_S
    started = time.monotonic()
    answer = ask(gateway, distinct(image, 1))
    assert (answer.status_code, time.monotonic() - started < 0.5) == (503, True)
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert own_server.url not in answer.text
    own_server.start()
    until(gateway.ready, 15)
    assert ask(gateway, distinct(image, 2)).status_code == 200


def test_a_frozen_triton_keeps_nobody_waiting(gateway, own_server, picture):
    _, image, _ = picture
    own_server.pause()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, gateway, distinct(image, number)) for number in range(4)]
        assert until(lambda: not gateway.ready(), 5) < FLIP_S
        assert {future.result(timeout=20).status_code for future in waiting} <= {503, 504}
    own_server.resume()
    until(gateway.ready, 15)
    assert ask(gateway, distinct(image, 9)).status_code == 200


def test_a_full_queue_is_429_and_what_waits_too_long_is_504(shared_server, picture):
    _, image, _ = picture
    num = 4 * (SLOW_BATCH + SLOW_QUEUE)
    with (
        serving("slow", engine="triton", triton__url=shared_server.url) as gateway,
        ThreadPoolExecutor(num) as pool,
    ):
        answers = list(pool.map(lambda number: ask(gateway, distinct(image, number)), range(num)))
        statuses = {answer.status_code for answer in answers}
        assert {200, 429} <= statuses <= {200, 429, 504}
        assert all(
            int(answer.headers["retry-after"]) >= 1
            for answer in answers
            if answer.status_code == 429
        )
    with (
        serving(
            "slow", engine="triton", triton__url=shared_server.url, limits__deadline_s=0.5
        ) as gateway,
        ThreadPoolExecutor(6) as pool,
    ):
        answers = list(pool.map(lambda number: ask(gateway, distinct(image, number)), range(6)))
        assert {answer.status_code for answer in answers} <= {200, 429, 504}
        assert 504 in {answer.status_code for answer in answers}


def test_a_triton_that_others_keep_busy_is_ready(shared_server, picture):
    _, image, _ = picture
    with (
        serving(
            "slow", engine="triton", triton__url=shared_server.url, triton__timeout_s=SLOW_S
        ) as gateway,
        flooded(shared_server, "slow"),
    ):
        statuses, ready = set(), set()
        for number in range(12):
            statuses.add(ask(gateway, distinct(image, number)).status_code)
            ready.add(gateway.ready())
    assert 504 in statuses
    assert statuses <= {429, 504}
    assert ready == {True}


def test_many_clients_at_once_share_tritons_batches(shared_server, picture):
    _, image, _ = picture
    before = [
        shared_server.metric(f"nv_inference_{what}", "tiny") for what in ("count", "exec_count")
    ]
    with (
        serving("tiny", engine="triton", triton__url=shared_server.url) as gateway,
        ThreadPoolExecutor(32) as pool,
    ):
        rows = np.array(
            list(pool.map(lambda number: served(gateway, distinct(image, number)), range(256)))
        )
    assert (rows @ rows[0] > 0.9999).all()
    count, batches = (
        shared_server.metric(f"nv_inference_{what}", "tiny") - earlier
        for what, earlier in zip(("count", "exec_count"), before, strict=True)
    )
    assert count >= 256
    assert batches < count


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "absent"}, "the model absent is not loaded in Triton"),
        ({"model": "bare"}, "does not state its fingerprint"),
        ({"model": "tiny", "triton__version": 7}, "version 7 of the model tiny is not loaded"),
        ({"model": "tiny", "exif": "ignore"}, "prepares images otherwise"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(shared_server, monkeypatch, given, message):
    for name, value in ({"engine": "triton", "triton__url": shared_server.url} | given).items():
        monkeypatch.setenv(f"MLCD_{name.upper()}", str(value))
    result = run_mlcd("serve", "--port", 0)
    assert (result.returncode, len(result.stderr.strip().splitlines())) == (2, 1), result.stderr
    assert message in result.stderr


def test_a_server_without_triton_does_not_start(own_server, monkeypatch):
    own_server.kill()
    gateway = Gateway("tiny", engine="triton", triton__url=own_server.url)
    output, _ = gateway.process.communicate(timeout=60)
    assert gateway.process.returncode == 2
    assert "cannot be reached" in output
