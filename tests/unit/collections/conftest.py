"""Small collections, and the oracle: a dict and float64."""

import numpy as np
import pytest

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.indexes import gpu_copy
from mlcd.types import unit_rows

FINGERPRINT = "a" * 64
DIMENSION = 16


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Lets the CPU search, also where there is a GPU: an index of its own is what is asked about."""
    monkeypatch.setattr(gpu_copy, "find_gpu", lambda: None)


@pytest.fixture
def collection(tmp_path):
    with Collection.create(
        tmp_path / "c", fingerprint=FINGERPRINT, dimension=DIMENSION
    ) as collection:
        yield collection


@pytest.fixture
def vectors():
    return unit_rows(np.random.default_rng(0).standard_normal((400, DIMENSION)))


@pytest.fixture
def filled(collection, vectors):
    collection.add(
        [Item(f"i{n}", vector, {"n": n, "odd": n % 2 == 1}) for n, vector in enumerate(vectors)]
    )
    return collection
