"""Fixtures of the stores of collections: one place after the other, opened as often as there are
servers.
"""

import contextlib

import numpy as np
import pytest

from mlcd.collections.item import Item
from mlcd.collections.places import open_place
from mlcd.indexes import gpu_copy, gpu_vectors
from mlcd.types import unit_rows
from tests.faiss_clones import let_clones_be_copies
from tests.milvus_server import milvus_lite, milvus_server
from tests.postgres_server import postgres_server

FINGERPRINT = "a" * 64
DIMENSION = 16


@pytest.fixture(scope="session")
def postgres():
    with postgres_server() as running:
        running.ask("CREATE EXTENSION vector")
        yield running


@pytest.fixture(scope="session")
def milvus():
    with milvus_server() as running:
        yield running


@pytest.fixture(scope="session")
def lite(tmp_path_factory):
    with milvus_lite(tmp_path_factory.mktemp("lite")) as running:
        yield running


def search_as_on_a_gpu(monkeypatch):
    """Lets torch and faiss on the CPU take a GPU's role, also for few items."""
    device_rows = pytest.importorskip("mlcd.indexes.device_rows")
    gpu_graph = pytest.importorskip("mlcd.indexes.gpu_graph")
    let_clones_be_copies(monkeypatch)
    monkeypatch.setattr(gpu_copy, "find_gpu", lambda: "cpu")
    monkeypatch.setattr(gpu_vectors, "LEAST_ROWS", 1)
    monkeypatch.setattr(gpu_vectors, "GRAPH_LEAST_BYTES", 1)
    monkeypatch.setattr(gpu_graph, "_LEAST_SPEEDUP", 0)
    monkeypatch.setattr(device_rows, "free_bytes", lambda: 1 << 40)


@pytest.fixture(
    params=[
        "folder",
        "gpu",
        pytest.param("postgresql", marks=pytest.mark.postgres),
        pytest.param("milvus", marks=pytest.mark.milvus),
        pytest.param("lite", marks=pytest.mark.milvus),
    ]
)
def place(request, tmp_path, monkeypatch):
    """Returns the place that keeps collections."""
    monkeypatch.setattr(gpu_copy, "find_gpu", lambda: None)
    if request.param == "gpu":
        search_as_on_a_gpu(monkeypatch)
    if request.param in ("folder", "gpu"):
        return str(tmp_path / "collections")
    if request.param in ("milvus", "lite"):
        server = request.getfixturevalue(request.param)
        with contextlib.closing(open_place(server.url())) as store:
            for name in store.all():
                store.delete(name)
        return server.url()
    server = request.getfixturevalue("postgres")
    server.ask("DROP SCHEMA IF EXISTS mlcd CASCADE")
    return server.url()


@pytest.fixture
def opened(place):
    """Opens the place, as another server would."""
    with contextlib.ExitStack() as stack:

        def open_store():
            return stack.enter_context(contextlib.closing(open_place(place)))

        yield open_store


@pytest.fixture
def store(opened):
    return opened()


@pytest.fixture
def collection(store):
    return store.create("c", fingerprint=FINGERPRINT, dimension=DIMENSION)[0]


@pytest.fixture(scope="module")
def vectors():
    return unit_rows(np.random.default_rng(0).standard_normal((400, DIMENSION)))


@pytest.fixture
def filled(collection, vectors):
    collection.add(
        [Item(f"i{n}", vector, {"n": n, "odd": n % 2 == 1}) for n, vector in enumerate(vectors)]
    )
    return collection
