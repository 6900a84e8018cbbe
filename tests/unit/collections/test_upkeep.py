import numpy as np

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item


def test_the_upkeep_does_not_make_again_what_was_made_while_it_waited(tmp_path, monkeypatch):
    monkeypatch.setattr("mlcd.collections.upkeep._UNINDEXED_ROWS", 50)
    path = tmp_path / "c"
    Collection.create(path, fingerprint="a" * 64, dimension=16).close()
    with Collection.open(path, background=False) as collection:
        collection.add([Item(f"i{n}", np.eye(16)[n % 16] + n) for n in range(100)])
        collection._background = True
        # each call finds the index due; the thread that it begins waits for this one
        collection.reindex(lambda _: collection._start_indexing_if_due())
        assert collection._upkeep._thread is not None
        collection._upkeep.join()
        assert (collection.describe().generation, collection.describe().indexed) == (1, 100)
