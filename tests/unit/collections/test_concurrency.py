"""Readers and writers at once: no error, nothing found after its delete was acknowledged, nothing
lost.
"""

import threading
import time

import numpy as np
import pytest

from mlcd.collections import write_queue as module
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.errors import NotFound
from mlcd.types import unit_rows

DIMENSION = 16
IDS = 60


class Traffic:
    """Eight readers, two writers, and the background index that they bring about."""

    def __init__(self, collection, seconds):
        self.collection, self.until = collection, time.monotonic() + seconds
        self.errors, self.searches, self.writes = [], 0, 0
        self.deleted = {}  # id: when its delete was acknowledged; not there while it is being added
        self.state = [{}, {}]

    def run(self):
        threads = [threading.Thread(target=self._guarded, args=(self._read, n)) for n in range(8)]
        threads += [threading.Thread(target=self._guarded, args=(self._write, n)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.errors, self.errors[0]

    def _guarded(self, work, number):
        rng = np.random.default_rng(number)
        try:
            # On a machine under load as on an idle one, enough has happened at the end.
            while not self.errors and (
                time.monotonic() < self.until or min(self.writes, self.searches) < 100
            ):
                work(rng, number)
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            self.errors.append(error)

    def _read(self, rng, number):
        gone_before = dict(self.deleted)
        query = unit_rows(rng.standard_normal((1, DIMENSION)))
        filter_ = {"field": "odd", "eq": True} if number % 2 else None
        found = self.collection.search(query, 10, filter=filter_, exact=number % 3 == 0)
        matches = found.matches[0]
        gone_after = dict(self.deleted)
        for match in matches:
            assert match.metadata["odd"] or filter_ is None
            came_back = gone_before.get(match.id) != gone_after.get(match.id)
            assert match.id not in gone_before or came_back, f"{match.id} was deleted"
        assert len({match.id for match in matches}) == len(matches) == min(10, found.matching)
        self.searches += 1

    def _write(self, rng, number):
        item_id = f"w{number}-{rng.integers(IDS)}"
        if rng.random() < 0.3 and item_id in self.state[number]:
            self.collection.delete(item_id)
            del self.state[number][item_id]
            self.deleted[item_id] = time.monotonic()
            with pytest.raises(NotFound):
                self.collection.get(item_id)
        else:
            self.deleted.pop(item_id, None)
            vector = unit_rows(rng.standard_normal((1, DIMENSION)))[0]
            self.collection.add([Item(item_id, vector, {"odd": bool(rng.integers(2))})])
            self.state[number][item_id] = vector
            assert (self.collection.get(item_id).embedding == vector).all()
        self.writes += 1


def traffic(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr("mlcd.collections.upkeep._UNINDEXED_ROWS", 20)
    path = tmp_path / "c"
    with Collection.create(path, fingerprint="a" * 64, dimension=DIMENSION) as collection:
        collection.add(
            [
                Item(f"r{n}", np.eye(DIMENSION)[n % 16] + 0.01 * n, {"odd": n % 2 == 1})
                for n in range(50)
            ]
        )
        run = Traffic(collection, seconds)
        run.run()
        assert collection.describe().generation > 1
    with Collection.open(path) as collection:
        kept = {
            item.id: item.embedding
            for block in collection.items()
            for item in block
            if item.id[0] == "w"
        }
        expected = run.state[0] | run.state[1]
        assert kept.keys() == expected.keys()
        assert all((kept[item_id] == vector).all() for item_id, vector in expected.items())


def test_readers_and_writers_do_not_disturb_each_other(tmp_path, monkeypatch):
    traffic(tmp_path, monkeypatch, 5)


def test_writers_share_a_transaction(tmp_path, monkeypatch):
    """Forty who wait are written by the first that comes: in far fewer transactions than
    they are.
    """
    sizes = []
    original = module.commit

    def counted(ledger, changes, dimension):
        sizes.append(len(changes))
        original(ledger, changes, dimension)

    monkeypatch.setattr(module, "commit", counted)
    with Collection.create(tmp_path / "c", fingerprint="a" * 64, dimension=DIMENSION) as collection:
        with collection._writes.lock:
            threads = [
                threading.Thread(target=collection.add, args=([Item(f"i{n}", np.ones(DIMENSION))],))
                for n in range(40)
            ]
            for thread in threads:
                thread.start()
            while len(collection._writes.waiting) < 40:
                time.sleep(0.001)
        for thread in threads:
            thread.join()
        assert sizes == [40]
        assert len(collection) == 40


def test_of_changes_written_together_each_has_its_own_answer(tmp_path):
    with Collection.create(tmp_path / "c", fingerprint="a" * 64, dimension=DIMENSION) as collection:
        collection.add([Item("there", np.ones(DIMENSION))])
        answers = {}

        def ask(name):
            try:
                answers[name] = collection.delete(name)
            except NotFound as error:
                answers[name] = error

        with collection._writes.lock:
            threads = [
                threading.Thread(target=ask, args=(name,))
                for name in ("absent", "there", "nowhere")
            ]
            for thread in threads:
                thread.start()
            while len(collection._writes.waiting) < 3:
                time.sleep(0.001)
        for thread in threads:
            thread.join()
        assert answers["there"] is None
        assert "'absent'" in str(answers["absent"])
        assert "'nowhere'" in str(answers["nowhere"])
