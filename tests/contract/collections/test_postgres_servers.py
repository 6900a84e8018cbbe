"""Servers on one real Postgres: its mistakes, its credentials and its settings."""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mlcd.collections.places import open_place
from mlcd.errors import ConfigInvalid, StoreUnreachable
from tests.contract.collections.conftest import DIMENSION, FINGERPRINT
from tests.integration.running import Server
from tests.postgres_server import postgres_server

pytestmark = pytest.mark.postgres
SECRET = "s3cret-pass"
MODEL = "fake:latency_ms=0,dimension=32"


@pytest.fixture
def own():
    """A Postgres that a test may kill."""
    with postgres_server() as running:
        running.prepare()
        yield running


def test_a_mistake_is_one_line_with_its_remedy_and_without_the_password(own, monkeypatch):
    own.ask("CREATE DATABASE bare")
    own.ask("CREATE EXTENSION IF NOT EXISTS vector")
    own.set_password("ann", SECRET)
    for url, said in (
        (own.url(credentials="ann:wrong-" + SECRET), "refuses the user or the password"),
        (own.url(credentials="ann"), "refuses the user or the password"),
        (own.url("absent"), "lacks this database or user"),
        (f"postgresql://ann:{SECRET}@127.0.0.1:1/postgres", "cannot be reached now"),
        (own.url("bare", f"ann:{SECRET}"), "CREATE EXTENSION vector there as a superuser"),
        (own.url(credentials=f"ann:{SECRET}"), "GRANT"),
    ):
        with pytest.raises((ConfigInvalid, StoreUnreachable), match=said) as caught:
            open_place(url)
        assert SECRET not in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "mlcd.collections.postgres.store", None)
    with pytest.raises(ConfigInvalid, match=r"pip install .*\[postgres\]"):
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
        store._database.connect() as connection,
    ):
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


def test_processes_that_open_an_empty_database_at_once_all_open_it(own):
    own.ask("DROP EXTENSION vector CASCADE")
    for number in range(3):
        own.ask(f"CREATE DATABASE empty{number}")
        with ThreadPoolExecutor(12) as pool:
            opened = pool.map(lambda _, n=number: open_place(own.url(f"empty{n}")), range(12))
            for store in opened:
                store.close()


def test_a_database_that_is_only_read_for_a_while_takes_writes_after_it_without_a_restart(own):
    """The URL leads to the old primary, or to a standby, for a moment."""
    pinned = {"fingerprint": FINGERPRINT, "dimension": DIMENSION}
    own.ask("CREATE EXTENSION IF NOT EXISTS vector")
    own.set_password("ann", SECRET)
    own.ask("GRANT CREATE ON DATABASE postgres TO ann")
    url = own.url(credentials=f"ann:{SECRET}")
    open_place(url).close()
    own.ask("ALTER ROLE ann SET default_transaction_read_only = on")
    with contextlib.closing(open_place(url)) as store, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store.find_new(), range(8)))
        with pytest.raises(StoreUnreachable, match="takes no writes now"):
            store.create("c", **pinned)
        own.ask("ALTER ROLE ann SET default_transaction_read_only = off")
        for number in range(8):
            store.create(f"c{number}", **pinned)
