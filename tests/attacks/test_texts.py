"""Texts that are dear: as many and as long as they may be, from several clients at once."""

import threading
import time

import httpx
import pytest

from tests.attacks.conftest import watched
from tests.integration.running import serving

CLIENTS = 5
JSON = {"Content-Type": "application/json"}
ONE = {"texts": ["red"]}


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    with serving("fake:text=true,latency_ms=1", engine="fake", state_dir=state) as server:
        yield server


class Crowd:
    """Clients that send one body again and again."""

    def __init__(self, server, path, body):
        self._ended = threading.Event()
        self.statuses = []
        self._threads = [
            threading.Thread(target=self._send, args=(server, path, body), daemon=True)
            for _ in range(CLIENTS)
        ]

    def _send(self, server, path, body):
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not self._ended.is_set():
                self.statuses.append(client.post(path, content=body, headers=JSON).status_code)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        for thread in self._threads:
            thread.join()


def texts(num, text):
    return httpx.Request("POST", "http://x", json={"texts": [text] * num}).content


BODIES = {
    "prose": texts(128, ("a small brown dog runs through the field " * 210)[:8000]),
    "one long word": texts(128, "x" * 8000),
    "punctuation": texts(500, "!?" * 1000),
    "many": texts(2000, "a small brown dog " * 25),
    "another script": texts(100, "字" * 8000),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_word_is_embedded_between_texts_as_long_as_they_may_be(reading, name):
    """A million characters of each of five clients: 4 MB held the tokenizer for 24 s."""
    with (
        Crowd(reading, "/v1/texts/embed", BODIES[name]) as crowd,
        watched(reading, "/v1/texts/embed", method="POST", json=ONE) as watch,
    ):
        time.sleep(4)
    assert set(crowd.statuses) <= {200, 429}
    assert set(watch.statuses) == {200}
    assert sorted(watch.seconds)[int(0.95 * len(watch.seconds))] < 1.0


def test_more_characters_than_a_request_may_have_are_refused_before_they_are_read(reading):
    started = time.perf_counter()
    for path, body in (
        ("/v1/texts/embed", {"texts": ["word " * 400] * 2048}),
        ("/v2/embed", {"model": reading_model(reading), "texts": ["word " * 400] * 2048}),
        ("/v1/embeddings", {"model": reading_model(reading), "input": ["word " * 400] * 2048}),
    ):
        answer = httpx.post(reading.url + path, json=body, timeout=60)
        assert answer.status_code in (400, 413)  # as the dialect has it
        assert "max_request_chars" in answer.text
    assert time.perf_counter() - started < 10


def reading_model(server):
    return httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]


def test_prompts_are_counted_before_they_are_made(reading):
    """128 names by 128 templates: 131 MB of text from one of 1 MB."""
    names = [f"{number} " + "n" * 4000 for number in range(128)]
    templates = [f"{number} " + "t" * 4000 + " {}" for number in range(128)]
    body = {"embeddings": [[1.0] * 8], "names": names, "templates": templates}
    before = reading.resident_mib()
    with watched(reading, "/v1/texts/embed", method="POST", json=ONE) as watch:
        answer = httpx.post(f"{reading.url}/v1/classify", json=body, timeout=60)
    assert (answer.status_code, answer.json()["limit"]) == (413, "max_request_chars")
    assert reading.resident_mib() - before < 50
    assert max(watch.seconds) < 1.0
