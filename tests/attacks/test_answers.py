"""Answers that are dear: a small request for very much."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.attacks.conftest import watched
from tests.attacks.test_bodies import peak_mib

NUM_ITEMS = 1000
LIMIT = 64 * 2**20


@pytest.fixture(scope="module")
def heavy(attacked, tokens):
    """A collection whose items have as much metadata as they may: 15 kB each."""
    headers = {"Authorization": f"Bearer {tokens[1]}"}
    rows = np.random.default_rng(0).normal(size=(NUM_ITEMS, 64))
    with httpx.Client(base_url=attacked.url, headers=headers, timeout=60) as client:
        dimension = client.get("/v1/info").json()["dimension"]
        assert client.put("/v1/collections/heavy").status_code == 201
        for start in range(0, NUM_ITEMS, 50):
            items = [
                {
                    "id": f"i{index}",
                    "embedding": np.resize(rows[index], dimension).tolist(),
                    "metadata": {"text": "m" * 15_000},
                }
                for index in range(start, start + 50)
            ]
            assert (
                client.post("/v1/collections/heavy/items", json={"items": items}).status_code == 200
            )
        yield client, np.resize(rows[0], dimension).tolist()


def search(client, row, num, top, **options):
    body = {"embeddings": [row] * num, "top": top, **options}
    return client.post("/v1/collections/heavy/search", json=body)


def test_an_answer_that_would_be_huge_is_refused_before_it_is_made(attacked, heavy):
    """64 queries of a thousand matches: 920 MB, 3.9 GB of memory, ten seconds of everybody."""
    client, row = heavy
    before = attacked.resident_mib()
    with watched(attacked) as watch:
        answer = search(client, row, 64, NUM_ITEMS)
    assert (answer.status_code, answer.json()["limit"]) == (413, "max_answer_bytes")
    assert "metadata=false" in answer.json()["detail"]
    assert peak_mib(attacked) - before < 200
    assert max(watch.seconds) < 1.0


def test_without_metadata_it_is_given(heavy):
    client, row = heavy
    answer = search(client, row, 64, NUM_ITEMS, metadata=False)
    results = answer.json()["results"]
    assert [len(result["matches"]) for result in results] == [NUM_ITEMS] * 64
    assert {match["metadata"] for match in results[0]["matches"]} == {None}
    assert results == search(client, row, 64, NUM_ITEMS, metadata=False).json()["results"]


def test_answers_as_large_as_they_may_be_stop_nobody(attacked, heavy):
    """Four at a time of almost 64 MiB each, in which the metadata are what was sent."""
    client, row = heavy

    def ask(_):
        answer = search(client, row, 4, NUM_ITEMS)
        assert answer.status_code == 200
        assert LIMIT // 2 < len(answer.content) < LIMIT
        return answer.json()["results"]

    with watched(attacked) as watch, ThreadPoolExecutor(4) as pool:
        every = list(pool.map(ask, range(4)))
    for results in every:
        assert [result["index"] for result in results] == [0, 1, 2, 3]
        assert all(match["metadata"] == {"text": "m" * 15_000} for match in results[0]["matches"])
    assert max(watch.seconds) < 1.0
