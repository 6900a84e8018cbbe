"""Real servers on one real store: what one of them acknowledged is there, once, whoever is killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import numpy as np
import pytest

from mlcd.collections.item import Item
from mlcd.collections.places import open_place
from mlcd.errors import StoreUnreachable
from tests.contract.collections.conftest import DIMENSION, FINGERPRINT
from tests.integration.running import serving, until
from tests.milvus_server import milvus_server
from tests.postgres_server import postgres_server

NUM_WRITERS = 3
MODEL = "fake:latency_ms=0,dimension=32"


@pytest.fixture(
    params=[
        pytest.param(postgres_server, marks=pytest.mark.postgres, id="postgresql"),
        pytest.param(milvus_server, marks=pytest.mark.milvus, id="milvus"),
    ]
)
def own(request):
    """A store that a test may kill."""
    with request.param() as running:
        running.prepare()
        yield running


@contextlib.contextmanager
def two_servers(database):
    settings = {"engine": "fake", "collections__store": database.url()}
    with serving(MODEL, **settings) as first, serving(MODEL, **settings) as second:
        yield first, second


class Writers:
    """Threads that add items one by one to a server, each until it is acknowledged."""

    def __init__(self, servers, dimension):
        self.acknowledged, self.refused = [], []
        self._servers, self._dimension = servers, dimension
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, args=(number,)) for number in range(NUM_WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _write(self, number):
        rng, count = np.random.default_rng(number), 0
        url = self._servers[number % len(self._servers)].url
        while not self._stopped.is_set():
            item = {
                "id": f"w{number}-{count}",
                "embedding": rng.standard_normal(self._dimension).tolist(),
                "metadata": {"writer": number},
            }
            try:
                answer = httpx.post(
                    f"{url}/v1/collections/c/items", json={"items": [item]}, timeout=30
                )
            except httpx.TransportError:
                continue
            if answer.status_code == 200:
                self.acknowledged.append(item["id"])
                count += 1
            else:
                self.refused.append(answer)


def test_what_two_servers_acknowledged_is_there_once_whoever_is_killed(own):
    with two_servers(own) as (first, second):
        made = httpx.put(f"{first.url}/v1/collections/c").json()
        assert made["store"]["writers"] == "many"
        writers = Writers((first, second), made["dimension"])

        def go_on(num):
            wanted = len(writers.acknowledged) + num
            until(lambda: len(writers.acknowledged) >= wanted, 60, first)

        try:
            go_on(60)
            second.process.kill()
            second.process.communicate()
            go_on(20)
            second.start_again()
            second.wait_ready()
            for _ in range(2):
                go_on(30)
                own.kill()
                assert httpx.get(f"{first.url}/health/live").status_code == 200
                own.start()
            go_on(60)
        finally:
            writers.stop()
        assert {answer.status_code for answer in writers.refused} <= {503}
        own.wait_idle()
        for server in (first, second):
            described = httpx.get(f"{server.url}/v1/collections/c").json()
            found = httpx.post(
                f"{server.url}/v1/collections/c/search",
                json={"embeddings": [[1.0] * made["dimension"]], "top": 1000, "exact": True},
            ).json()
            ids = [match["id"] for match in found["results"][0]["matches"]]
            assert len(ids) == len(set(ids)) == found["matching"] == described["items"]
            assert set(writers.acknowledged) <= set(ids)
            # one that was written and whose answer was lost may be there beside them
            assert len(ids) <= len(writers.acknowledged) + NUM_WRITERS


BATCHES = """
import sys
import numpy as np
from mlcd.collections.item import Item
from mlcd.collections.places import open_place

collection = open_place(sys.argv[1]).get("c")
for batch in range(10_000):
    rows = np.random.default_rng(batch).standard_normal((50, collection.dimension))
    collection.add([Item(f"b{batch}-{n}", row) for n, row in enumerate(rows)])
    print(batch, flush=True)
"""


def test_what_a_killed_writer_was_told_is_there_once(own):
    with contextlib.closing(open_place(own.url())) as store:
        collection, _ = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
        for _ in range(3):
            process = subprocess.Popen(
                [sys.executable, "-c", BATCHES, own.url()], stdout=subprocess.PIPE, text=True
            )
            told = [process.stdout.readline() for _ in range(8)]
            os.kill(process.pid, signal.SIGKILL)
            told += process.communicate()[0].split()
            acknowledged = {int(line) for line in told}
            own.wait_idle()
            ids = [item.id for block in collection.items() for item in block]
            assert len(ids) == len(set(ids)) == len(collection)
            batches = np.bincount([int(re.match(r"b(\d+)-", item_id)[1]) for item_id in ids])
            assert (batches[list(acknowledged)] == 50).all()
            if not any("no transaction" in each for each in collection.promises.cannot):
                assert {*batches.tolist()} == {50}


def test_while_the_store_is_away_requests_say_so_and_then_go_on(own):
    with contextlib.closing(open_place(own.url())) as store:
        collection, _ = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
        collection.add([Item("a", np.ones(DIMENSION))])
        own.kill()
        for ask in (
            lambda: collection.add([Item("b", np.ones(DIMENSION))]),
            lambda: collection.search(np.ones((1, DIMENSION)), 1),
            lambda: store.has_arrived("d"),
        ):
            with pytest.raises(StoreUnreachable, match="cannot be reached now"):
                ask()
        own.start()
        assert collection.add([Item("a", np.ones(DIMENSION))]) == ["unchanged"]
        assert collection.search(np.ones((1, DIMENSION)), 1).matches[0][0].id == "a"
