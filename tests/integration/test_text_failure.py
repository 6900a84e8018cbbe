"""The tower of texts on bad days: it dies, it is sent hostile texts, it is sent too many."""

import io
import json
import os
import signal
import threading
import time
from datetime import UTC, datetime

import httpx
import numpy as np
import pytest
from PIL import Image

from mlcd.service.keys.file import create_key
from tests.integration.running import asking, serving, until

PNG = {"Content-Type": "image/png"}


def picture():
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), "red").save(buffer, "PNG")
    return buffer.getvalue()


def test_a_tower_of_texts_that_dies_stops_no_image():
    with asking("fake:text=true,latency_ms=5", engine="fake") as (server, client):
        image = picture()
        images, texts = server.workers()
        assert server.metric("mlcd_text_engine_up") == server.metric("mlcd_engine_up") == 1
        failed, stop = [], threading.Event()

        def send_images():
            with httpx.Client(base_url=server.url, timeout=20) as other:
                while not stop.is_set():
                    answer = other.post("/v1/images/embed", content=image, headers=PNG)
                    if answer.status_code != 200:
                        failed.append(answer.text)

        sender = threading.Thread(target=send_images)
        sender.start()
        os.kill(texts, signal.SIGKILL)
        until(lambda: server.metric("mlcd_text_engine_restarts_total") == 1, 20, server)
        until(server.ready, 20, server)
        stop.set()
        sender.join()
        assert failed == []
        assert server.workers()[0] == images
        assert server.metric("mlcd_engine_restarts_total") == 0
        assert client.post("/v1/texts/embed", json={"texts": ["red"]}).status_code == 200


def test_while_the_tower_of_texts_is_down_texts_are_refused_and_the_server_is_not_ready():
    with asking("fake:text=true,latency_ms=5", engine="fake") as (server, client):
        for _ in range(2):  # the second one in a row comes back after a pause
            os.kill(server.workers()[-1], signal.SIGKILL)
            until(lambda: server.metric("mlcd_text_engine_up") == 0, 5, server)
            until(lambda: len(server.workers()) == 2 or server.ready() is False, 5, server)
            answer = client.post("/v1/texts/embed", json={"texts": ["red"]})
            assert answer.status_code in (200, 503)
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) >= 1
            until(server.ready, 20, server)


class Health:
    """The times of probes and of images while something else goes on."""

    def __init__(self, url):
        self._url, self._stop = url, threading.Event()
        self.slowest_s = 0.0

    def __enter__(self):
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _ask(self):
        image = picture()
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._stop.is_set():
                started = time.monotonic()
                assert client.get("/health/live").status_code == 200
                answer = client.post("/v1/images/embed", content=image, headers=PNG)
                assert answer.status_code == 200
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)


@pytest.fixture(scope="module")
def server():
    with serving(
        "fake:text=true,latency_ms=1", engine="fake", cache__memory_bytes=2**22
    ) as running:
        yield running


HOSTILE = {
    "many": (["x"] * 100_000, 413),
    "a_million_characters": (["x" * 2**20], 200),
    "four_million_characters": (["x" * 2**22], 200),
    "many_long_ones": ([f"{number} " + "word " * 1600 for number in range(400)], 413),
    "as_many_as_may_be": ([f"text {number}" for number in range(2048)], 200),
    "one_long_word": (["ab" * 4096] * 64, 200),
    "nulls": (["\x00" * 8192, "a\x00b", "\x00"], 200),
    "control": (["\x01\x1b[2J\x7f\x9f", "\ufeff\u200b", "\ufdd0\uffff"], 200),
    "right_to_left": (["שלום \u202eabc\u202c", "السلام عليكم" * 100], 200),
    "emoji": (["👩‍👩‍👧‍👦" * 500, "e\u0301" * 4000], 200),
    "no_strings": ([None, 1, 1.5, True, [], {}, ["red"]], 200),
    "nothing": ([], 400),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_answered_or_refused_and_nobody_else_waits(server, name):
    texts, status = HOSTILE[name]
    with Health(server.url) as health, httpx.Client(base_url=server.url, timeout=60) as client:
        answer = client.post("/v1/texts/embed", json={"texts": texts})
        time.sleep(0.05)
    assert answer.status_code == status, answer.text[:300]
    if status == 200:
        content = answer.json()
        assert len(content["results"]) + len(content["errors"]) == len(texts)
        rows = np.array([one["embedding"] for one in content["results"]] or [[1.0]])
        assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-3)
    assert health.slowest_s < 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"texts": ["\\ud800"]}',
        b'{"texts": ["\\udc00\\ud800 red"]}',
        b'{"texts": ["\xff\xfe"]}',
        b'{"texts": ["\xed\xa0\x80"]}',
        b'{"texts": ["' + b"x" * (33 * 2**20) + b'"]}',
        b'{"texts": [' + b"[" * 5000 + b"]" * 5000 + b"]}",
        b'{"texts": {"red": 1}}',
        b'{"texts": "red"}',
        b'{"texts": ["' + "é".encode() * 3_000_000 + b'"]}',
    ],
)
def test_a_body_that_holds_no_texts_is_refused_in_one_line(server, body):
    headers = {"Content-Type": "application/json"}
    with Health(server.url) as health:
        answer = httpx.post(f"{server.url}/v1/texts/embed", content=body, headers=headers)
    assert answer.status_code in (400, 413)
    assert len(answer.json()["detail"]) < 200
    assert health.slowest_s < 2


def test_texts_beyond_the_queue_are_refused_and_counted():
    limits = {"limits__max_texts": 64, "limits__max_queued_texts": 64}
    with asking("fake:text=true,latency_ms=300", engine="fake", **limits) as (server, client):
        statuses = []

        def send(number):
            texts = [f"{number} {index}" for index in range(40)]
            answer = httpx.post(f"{server.url}/v1/texts/embed", json={"texts": texts}, timeout=20)
            statuses.append((answer.status_code, "retry-after" in answer.headers))

        senders = [threading.Thread(target=send, args=(number,)) for number in range(3)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        assert sorted(statuses) == [(200, False), (429, True), (429, True)]
        assert server.metric('mlcd_held{of="texts"}') == 0
        one = client.post("/v1/images/embed", content=picture(), headers=PNG)
        assert one.status_code == 200


def test_a_rate_counts_texts_like_images_and_prompts_only_once(tmp_path):
    keys = tmp_path / "keys"
    _, key = create_key(keys, "x", scopes=["embed"], now=datetime.now(UTC), rate=20)
    settings = {"auth__keys_file": keys, "cache__memory_bytes": 2**20}
    with serving("fake:text=true,latency_ms=1", engine="fake", **settings) as server:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=20) as client:
            asked = {"names": ["red", "blue"], "templates": "simple", "embeddings": [[1] * 8]}
            assert client.post("/v1/classify", json=asked).status_code == 200  # 14 and 1
            for _ in range(3):
                assert client.post("/v1/classify", json=asked).status_code == 200  # 1 each
            answer = client.post("/v1/texts/embed", json={"texts": ["red"] * 3})
            assert answer.status_code == 429
            assert json.loads(answer.content)["type"] == "urn:mlcd:problem:too-many-requests"
            assert client.post("/v1/texts/embed", json={"texts": ["red"]}).status_code == 200
