"""Servers on one real Milvus: its mistakes, its credentials, and what is particular to it."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from mlcd.collections.item import Item
from mlcd.collections.milvus.connection import MilvusClient
from mlcd.collections.places import open_place
from mlcd.errors import ConfigInvalid, Conflict, NotFound, StoreUnreachable
from mlcd.types import unit_rows
from tests.contract.collections.conftest import DIMENSION, FINGERPRINT
from tests.integration.running import Server
from tests.milvus_server import milvus_server

pytestmark = pytest.mark.milvus
SECRET = "s3cret-pass"
MODEL = "fake:latency_ms=0,dimension=32"


@pytest.fixture(scope="module")
def guarded():
    """A Milvus that asks who somebody is."""
    with milvus_server(SECRET) as running:
        yield running


def test_a_mistake_is_one_line_with_its_remedy_and_without_the_password(guarded, monkeypatch):
    for url, said in (
        (guarded.url(credentials="root:wrong-" + SECRET), "refuses the user or the password"),
        (guarded.url(), "refuses the user or the password"),
        (guarded.url("absent", f"root:{SECRET}"), "lacks this database"),
        (f"milvus://root:{SECRET}@127.0.0.1:1", "cannot be reached now"),
        (f"milvus://root:{SECRET}@127.0.0.1:x/a", "needs a valid port"),
        (f"milvus://root:{SECRET}@127.0.0.1:1/a/b", "is not an address"),
        (f"milvus://root:{SECRET}@127.0.0.1:1/a?secret={SECRET}", "has an unknown option"),
        (f"milvus://root:{SECRET}@127.0.0.1:1/a?index={SECRET}", "hnsw, ivf_flat"),
        (
            f"milvus://root:{SECRET}@127.0.0.1:1/a?index=DISKANN",
            r"our tests cannot build it\): give one of hnsw, ivf_flat",
        ),
    ):
        with pytest.raises((ConfigInvalid, StoreUnreachable), match=said) as caught:
            open_place(url)
        assert SECRET not in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "mlcd.collections.milvus.store", None)
    with pytest.raises(ConfigInvalid, match=r"pip install .*\[milvus\]"):
        open_place(guarded.url())


def test_a_user_without_rights_is_told_which_are_required(guarded):
    client = MilvusClient(guarded.uri, token=f"root:{SECRET}")
    client.create_user("guest", SECRET)
    client.close()
    with pytest.raises(ConfigInvalid, match="refuses this user: grant it all on the collections"):
        open_place(guarded.url(credentials=f"guest:{SECRET}")).create(
            "c", fingerprint=FINGERPRINT, dimension=DIMENSION
        )


def test_the_environment_says_who_somebody_is(guarded, monkeypatch):
    for names in (
        {"MILVUS_USER": "root", "MILVUS_PASSWORD": SECRET},
        {"MILVUS_TOKEN": f"root:{SECRET}"},
    ):
        with monkeypatch.context() as patched:
            for name, value in names.items():
                patched.setenv(name, value)
            open_place(guarded.url()).close()


def test_a_server_shows_the_password_nowhere(guarded):
    server = Server(
        MODEL, engine="fake", collections__store=guarded.url(credentials=f"root:{SECRET}")
    ).wait_ready()
    try:
        shown = [httpx.put(f"{server.url}/v1/collections/c", timeout=30)]
        guarded.kill()
        paths = ("/v1/info", "/v1/collections", "/v1/collections/c", "/metrics", "/openapi.json")
        shown += [httpx.get(server.url + path, timeout=30) for path in paths]
        item = {"id": "a", "embedding": [1.0] * shown[0].json()["dimension"]}
        shown.append(
            httpx.post(f"{server.url}/v1/collections/c/items", json={"items": [item]}, timeout=30)
        )
    finally:
        _, said = server.stop()
        guarded.start()
    assert [answer.status_code for answer in shown] == [201, 200, 503, 503, 200, 200, 503]
    assert said.count('"message":"request"') == len(shown) - 1  # /metrics is logged at debug
    assert SECRET not in said + "".join(answer.text for answer in shown)


@pytest.fixture
def url(milvus):
    """Returns the URL of an empty store."""
    with contextlib.closing(open_place(milvus.url())) as store:
        for name in store.all():
            store.delete(name)
    return milvus.url()


def test_two_servers_that_create_a_collection_at_once_share_it(url):
    def create(number):
        with contextlib.closing(open_place(url)) as store:
            collection, made = store.create("c.d-e", fingerprint=FINGERPRINT, dimension=DIMENSION)
            collection.add([Item(f"i{number}", np.ones(DIMENSION))])
            return made

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(create, range(4)))
    assert sum(made) == 1
    with contextlib.closing(open_place(url)) as store:
        assert list(store.all()) == ["c.d-e"]
        assert len(store.get("c.d-e")) == 4
        identities = [name for name in store._connection.names() if name.startswith("mlcd_items")]
        assert len(identities) == 1


def test_what_milvus_cannot_hold_is_refused_before_anything_is_made(url):
    with contextlib.closing(open_place(url)) as store:
        for dimension in (1, 32_769):
            with pytest.raises(ConfigInvalid, match="2 to 32,768"):
                store.create("c", fingerprint=FINGERPRINT, dimension=dimension)
        assert store._connection.names() == []


def test_metadata_of_any_size_and_kind_are_kept_and_found(url):
    described = [
        {"text": "x" * 16_000},
        {"numbers": [float(n) for n in range(1500)]},
        {"half \ud800": "\ud800"},
        {"nul": "\0"},
        {f"field {n}": "y" * 64 for n in range(128)},
    ]
    with contextlib.closing(open_place(url)) as store:
        collection, _ = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
        assert collection.search(np.ones((1, DIMENSION)), 5).matches == [[]]  # it is empty
        rows = unit_rows(np.random.default_rng(0).standard_normal((len(described), DIMENSION)))
        collection.add(
            [
                Item(f"i{n}", row, one)
                for n, (row, one) in enumerate(zip(rows, described, strict=True))
            ]
        )
        for number, one in enumerate(described):
            assert collection.metadata_of(f"i{number}") == one
            name, value = next(iter(one.items()))
            wanted = value[-1] if isinstance(value, list) else value
            found = collection.search(rows, 5, filter={"field": name, "eq": wanted}).matches[0]
            assert [match.id for match in found] == [f"i{number}"]
        assert collection.search(rows, 5, filter={"field": "numbers", "gt": 1400}).matching == 1
        nowhere = collection.search(rows, 5, filter={"field": "nowhere", "eq": 1})
        assert (nowhere.matching, nowhere.exact) == (0, True)


def test_a_field_that_another_server_wrote_can_be_filtered_at_once(url):
    with (
        contextlib.closing(open_place(url)) as first,
        contextlib.closing(open_place(url)) as second,
    ):
        mine, _ = first.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
        theirs, _ = second.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
        theirs.add([Item("a", np.ones(DIMENSION), {"new": [1, 5]})])
        query = np.ones((1, DIMENSION))
        assert mine.search(query, 1, filter={"field": "new", "eq": 5}).matching == 1
        assert mine.search(query, 1, filter={"field": "new", "gt": 1, "lt": 5}).matching == 0
        assert mine.search(query, 1, filter={"field": "new", "ge": 5}).matching == 1


def test_searches_stay_right_while_items_are_deleted(url):
    rows = unit_rows(np.random.default_rng(0).standard_normal((3000, DIMENSION)))
    with contextlib.closing(open_place(url)) as store:
        collection, _ = store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
        collection.add([Item(f"i{n}", row, {"n": n}) for n, row in enumerate(rows)])
        gone = [0]

        def delete():
            for start in range(0, 2000, 100):
                collection.delete_all([f"i{n}" for n in range(start, start + 100)])
                gone[0] = start + 100

        deleting = threading.Thread(target=delete)
        deleting.start()
        while deleting.is_alive():
            before = gone[0]
            found = collection.search(rows[:1], 50, filter={"field": "n", "ge": 0})
            numbers = [match.metadata["n"] for match in found.matches[0]]
            assert len(set(numbers)) == len(numbers) == 50
            assert min(numbers) >= before
        deleting.join()
        assert len(collection) == collection.search(rows[:1], 1).matching == 1000


def test_a_search_of_a_collection_that_another_server_deleted_says_so(url):
    with (
        contextlib.closing(open_place(url)) as first,
        contextlib.closing(open_place(url)) as second,
    ):
        mine, _ = first.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)
        second.delete("c")
        second.create("c", fingerprint="b" * 64, dimension=DIMENSION)
        for ask in (
            lambda: mine.search(np.ones((1, DIMENSION)), 1),
            lambda: mine.add([Item("a", np.ones(DIMENSION))]),
        ):
            with pytest.raises((Conflict, NotFound)):
                ask()
        assert len(second.get("c")) == 0


def test_cells_are_audited_as_the_graph_is(url, monkeypatch):
    monkeypatch.setattr("mlcd.collections.milvus.copied_audit.LEAST_INDEXED", 500)
    rows = unit_rows(np.random.default_rng(0).standard_normal((3000, 64)))
    with contextlib.closing(open_place(f"{url}?index=ivf_flat")) as store:
        collection, _ = store.create("c", fingerprint=FINGERPRINT, dimension=64, recall=0.9)
        collection.add([Item(f"r{n}", row) for n, row in enumerate(rows)])
        collection.reindex()
        described = collection.describe()
        assert described.kind == "ivf_flat"
        assert described.recall["low"] >= 0.9
        assert not collection.search(rows[:1], 10).exact
