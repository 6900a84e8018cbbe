"""Answers that are dear: a small request for very much."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.attacks.conftest import request_head, watched
from tests.attacks.test_bodies import peak_mib
from tests.integration.running import serving, until

NUM_ITEMS = 1000
LIMIT = 64 * 2**20


@pytest.fixture(scope="module")
def heavy(attacked, tokens):
    """A collection whose items have as much metadata as they may: 15 kB each."""
    headers = {"Authorization": f"Bearer {tokens[1]}"}
    with httpx.Client(base_url=attacked.url, headers=headers, timeout=60) as client:
        yield client, add(client, NUM_ITEMS)


def add(client, num):
    """Returns the embedding of the first of so many items."""
    rows = np.random.default_rng(0).normal(size=(num, 64))
    dimension = client.get("/v1/info").json()["dimension"]
    assert client.put("/v1/collections/heavy").status_code in (200, 201)
    for start in range(0, num, 50):
        items = [
            {
                "id": f"i{index}",
                "embedding": np.resize(rows[index], dimension).tolist(),
                "metadata": {"text": "m" * 15_000},
            }
            for index in range(start, start + 50)
        ]
        added = client.post("/v1/collections/heavy/items", json={"items": items})
        assert added.status_code == 200
    return np.resize(rows[0], dimension).tolist()


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
    assert max(watch.seconds) < 2.0


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
    assert max(watch.seconds) < 2.0


HEAVY = "/v1/collections/heavy"
EVERYTHING = {
    "all items of the map": (f"{HEAVY}/layout/items", {"limit": 10_000}, ()),
    "all items of the map as a table": (f"{HEAVY}/layout/items", {}, ("Accept: text/csv",)),
    "all items as duplicates": (f"{HEAVY}/duplicates", {"similarity": -1}, ()),
}


@contextlib.contextmanager
def not_reading(server, token, num, path, body, lines):
    """So many clients that have asked and read nothing."""
    content = json.dumps(body).encode()
    lines = ("Content-Type: application/json", f"Content-Length: {len(content)}", *lines)
    head = request_head("POST", path, *lines, token=token)
    with contextlib.ExitStack() as stack:
        for _ in range(num):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            client.connect(("127.0.0.1", server.port))
            client.sendall(head + content)
        yield


@pytest.mark.parametrize("name", EVERYTHING)
def test_clients_that_do_not_read_are_answered_part_by_part(attacked, heavy, tokens, name):
    """15 MB for each of twelve, of which each connection holds a mebibyte or two."""
    path, body, lines = EVERYTHING[name]
    client, _ = heavy
    whole = client.post(path, json=body, headers={"Accept": "text/csv"} if lines else {})
    assert whole.status_code == 200
    assert len(whole.content) > 15_000 * NUM_ITEMS
    before = attacked.resident_mib()
    with not_reading(attacked, tokens[1], 12, path, body, lines), watched(attacked) as watch:
        time.sleep(2)
        during = attacked.resident_mib()
        held = attacked.metric('mlcd_held{of="answers"}')
    assert during - before < 120
    assert 0 < held <= 12 * 2**20
    assert max(watch.seconds) < 2.0


def test_what_no_client_reads_is_bounded_and_leaves_room_for_others(tokens, tmp_path_factory):
    """24 clients of one key: they get half of the budget, and somebody else is served."""
    state = tmp_path_factory.mktemp("state")
    limits = {"limits__max_answer_bytes": 2**23, "limits__max_unread_bytes": 2**25}
    with serving(
        "fake:latency_ms=1", engine="fake", state_dir=state, auth__keys_file=tokens[0], **limits
    ) as server:
        clients = [
            httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {token}"})
            for token in tokens[1:]
        ]
        add(clients[0], 500)
        path, body, lines = EVERYTHING["all items as duplicates"]
        assert clients[1].post(path, json=body).status_code == 200
        with not_reading(server, tokens[1], 24, path, body, lines):
            until(lambda: server.metric('mlcd_held{of="answers"}') == 2**24, 10)
            refused = clients[0].post(path, json=body)
            assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
            assert server.metric('mlcd_held{of="answers"}') == 2**24
            assert len(clients[1].post(path, json=body).content) > 500 * 15_000
            assert clients[0].get("/v1/info").status_code == 200
        until(lambda: server.metric('mlcd_held{of="answers"}') == 0, 10)
        for client in clients:
            client.close()
