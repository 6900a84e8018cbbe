"""Real servers on one real Postgres: what one of them acknowledged is there, once, whoever is
killed.
"""

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
from mlcd.errors import ConfigInvalid, StoreUnreachable
from tests.contract.collections.conftest import DIMENSION, FINGERPRINT
from tests.integration.running import Server, serving, until
from tests.postgres_server import postgres_server

pytestmark = pytest.mark.postgres
SECRET = "s3cret-pass"
NUM_WRITERS = 3
MODEL = "fake:latency_ms=0,dimension=32"


@pytest.fixture
def own():
    """A Postgres that a test may kill."""
    with postgres_server() as running:
        running.ask("CREATE EXTENSION vector")
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
        (stored,) = own.ask("SELECT items FROM mlcd.collections")
        for server in (first, second):
            described = httpx.get(f"{server.url}/v1/collections/c").json()
            found = httpx.post(
                f"{server.url}/v1/collections/c/search",
                json={"embeddings": [[1.0] * made["dimension"]], "top": 1000, "exact": True},
            ).json()
            ids = [match["id"] for match in found["results"][0]["matches"]]
            assert len(ids) == len(set(ids)) == found["matching"] == described["items"]
            assert stored == (len(ids),)
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


def test_a_batch_of_a_killed_writer_is_there_or_not(own):
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
            until(
                lambda: (
                    own.ask("SELECT count(*) FROM pg_stat_activity WHERE state = 'active'")
                    == [(1,)]
                ),
                30,
            )
            ids = [item.id for block in collection.items() for item in block]
            assert len(ids) == len(set(ids)) == len(collection)
            batches = [int(re.match(r"b(\d+)-", item_id)[1]) for item_id in ids]
            assert {*np.bincount(batches).tolist()} == {50}
            assert acknowledged <= set(batches)


def test_while_postgres_is_away_requests_say_so_and_then_go_on(own):
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


def test_a_mistake_is_one_line_with_its_remedy_and_without_the_password(own, monkeypatch):
    own.ask("CREATE DATABASE bare")
    own.ask("CREATE EXTENSION IF NOT EXISTS vector")
    own.set_password("ann", SECRET)
    for url, said in (
        (own.url(credentials="ann:wrong-" + SECRET), "refuses the user or the password"),
        (own.url(credentials="ann"), "refuses the user or the password"),
        (own.url("absent"), "has no such database or user"),
        (f"postgresql://ann:{SECRET}@127.0.0.1:1/postgres", "cannot be reached now"),
        (own.url("bare", f"ann:{SECRET}"), "CREATE EXTENSION vector there as a superuser"),
        (own.url(credentials=f"ann:{SECRET}"), "GRANT"),
    ):
        with pytest.raises((ConfigInvalid, StoreUnreachable), match=said) as caught:
            open_place(url)
        assert SECRET not in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "mlcd.collections.postgres.postgres_store", None)
    with pytest.raises(ConfigInvalid, match=r"pip install 'mlcd\[postgres\]'"):
        open_place(own.url())


def test_a_server_shows_the_password_nowhere(own):
    own.set_password("ann", SECRET)
    own.ask("GRANT CREATE ON DATABASE postgres TO public")
    server = Server(
        MODEL, engine="fake", collections__store=own.url(credentials=f"ann:{SECRET}")
    ).wait_ready()
    try:
        shown = [httpx.put(f"{server.url}/v1/collections/c")]
        own.kill()
        paths = ("/v1/info", "/v1/collections", "/v1/collections/c", "/metrics", "/openapi.json")
        shown += [httpx.get(server.url + path) for path in paths]
        shown.append(
            httpx.post(
                f"{server.url}/v1/collections/c/items",
                json={"items": [{"id": "a", "embedding": [1.0] * shown[0].json()["dimension"]}]},
            )
        )
    finally:
        _, said = server.stop()
    assert [answer.status_code for answer in shown] == [201, 200, 503, 503, 200, 200, 503]
    assert SECRET not in said + "".join(answer.text for answer in shown)


def test_a_database_that_may_lose_writes_is_said_to():
    with postgres_server("-c", "fsync=off") as careless:
        careless.ask("CREATE EXTENSION vector")
        with contextlib.closing(open_place(careless.url())) as store:
            collection, _ = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
            assert "fsync is off" in collection.promises.cannot[-1]


def test_an_acknowledgment_waits_for_the_disk(own):
    own.ask("ALTER DATABASE postgres SET synchronous_commit = off")
    with (
        contextlib.closing(open_place(own.url())) as store,
        store._database.connected() as connection,
    ):
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
