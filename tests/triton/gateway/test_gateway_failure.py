"""The gateway and its clients when Triton is killed, frozen, full or at another version."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conftest import run_mlcd
from tests.integration.running import Server as Gateway
from tests.integration.running import serving, until
from tests.triton.conftest import SLOW_BATCH, SLOW_QUEUE

pytestmark = pytest.mark.triton

FLIP_S = 2.0


def ask(server, image):
    return httpx.post(
        f"{server.url}/v1/images/embed",
        content=image,
        headers={"Content-Type": "image/png"},
        timeout=30,
    )


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


def test_a_full_queue_is_429_and_what_waits_too_long_is_504(shared_server, picture):
    given = {"engine": "triton", "triton__url": shared_server.url}
    for num, expected, limits in (
        (4 * (SLOW_BATCH + SLOW_QUEUE), 429, {}),
        (6, 504, {"limits__deadline_s": 0.5}),
    ):
        with serving("slow", **given, **limits) as gateway, ThreadPoolExecutor(num) as pool:
            images = [distinct(picture[1], number) for number in range(num)]
            answers = list(pool.map(lambda image, gateway=gateway: ask(gateway, image), images))
        statuses = {answer.status_code for answer in answers}
        assert {expected} <= statuses <= {200, 429, 504}
        refused = [answer for answer in answers if answer.status_code == 429]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "absent"}, "the model absent is not loaded in Triton"),
        ({"model": "bare"}, "must have the parameter fingerprint"),
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
