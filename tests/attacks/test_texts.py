"""Texts that are dear: as many and as long as they may be, from several clients at once."""

import time

import httpx
import pytest

from tests.attacks.conftest import watched
from tests.integration.running import serving

ONE = {"texts": ["red"]}


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    with serving("fake:text=true,latency_ms=1", engine="fake", state_dir=state) as server:
        yield server


def texts(num, text):
    return httpx.Request("POST", "http://x", json={"texts": [text] * num}).content


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
