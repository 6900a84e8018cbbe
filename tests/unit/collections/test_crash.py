"""Acknowledged writes survive kill -9; damaged files are found and made again, never served."""

import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.types import unit_rows

DIMENSION = 16
# Every thread writes ids of its own and tells what it is about to do and what was acknowledged,
# each by one write.
WRITERS = """
import os, random, sys, threading
from pathlib import Path
import numpy as np
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def write(collection, name, start, seed):
    rng = random.Random(seed)
    version = start
    while True:
        item_id, version = f"{name}{rng.randrange(40)}", version + 1
        known = True
        try:
            collection.get(item_id)
        except Exception:
            known = False
        kind = rng.choice(["put", "put", "describe", "delete"]) if known else "put"
        say("about", item_id, kind, version)
        if kind == "put":
            vector = np.random.default_rng(version).standard_normal(16)
            collection.add([Item(item_id, vector, {"version": version})])
        elif kind == "describe":
            collection.update_metadata(item_id, {"version": version})
        else:
            collection.delete(item_id)
        say("done", item_id, kind, version)

collection = Collection.open(Path(sys.argv[1]))
start = int(sys.argv[2])
for number, name in enumerate("abc"):
    arguments = (collection, name, start + number * 10_000_000, start + number)
    threading.Thread(target=write, args=arguments, daemon=True).start()
while True:
    collection.reindex()
"""


def vector_of(version):
    return unit_rows(np.random.default_rng(version).standard_normal((1, DIMENSION)))[0]


def after(state, kind, version):
    """state: (version of the vector, version of the metadata), None where the item is not there."""
    if kind == "delete":
        return None
    return (version, version) if kind == "put" else (state[0], version)


def kill_and_check(path, known, number, rng):
    command = [sys.executable, "-c", WRITERS, path, str(1 + number * 100_000_000)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.readline()
        time.sleep(rng.uniform(0, 0.6))
        assert process.poll() is None, process.stderr.read().decode()
        process.kill()
        lines = [first, *process.stdout.read().splitlines(keepends=True)]
    possible = {item_id: {state} for item_id, state in known.items()}
    acknowledged = 0
    for line in lines:
        word, item_id, kind, version = line.decode().split()
        states = possible.setdefault(item_id, {None})
        settled = {after(state, kind, int(version)) for state in states}
        possible[item_id] = settled if word == "done" else states | settled
        if word == "done":
            acknowledged += 1
            possible[item_id] = {after(known.get(item_id), kind, int(version))}
            known[item_id] = next(iter(possible[item_id]))
    with Collection.open(path, background=False) as collection:
        items = [item for block in collection.items() for item in block]
        ids = [item.id for item in items]
        assert len(ids) == len(set(ids)) == len(collection)
        found = {item.id: item for item in items}
        for item_id, states in possible.items():
            item = found.pop(item_id, None)
            if item is None:
                assert None in states, f"{item_id} is lost, {states}"
                known[item_id] = None
                continue
            version = item.metadata["version"]
            fitting = [state for state in states if state is not None and state[1] == version]
            assert fitting, f"{item_id} is of version {version}, not of {states}"
            assert np.allclose(item.embedding, vector_of(fitting[0][0]), atol=1e-6)
            known[item_id] = fitting[0]
        assert not found, "items that nobody added"
        vectors = (
            np.stack([item.embedding for item in items]) if items else np.empty((0, DIMENSION))
        )
        queries = unit_rows(np.random.default_rng(number).standard_normal((5, DIMENSION)))
        truth = np.sort(queries.astype(np.float64) @ vectors.T, axis=1)[:, ::-1][:, :10]
        for matches, scores in zip(collection.search(queries, 10).matches, truth, strict=True):
            assert [match.similarity for match in matches] == pytest.approx(
                scores.tolist(), abs=1e-5
            )
    return acknowledged


def killed(tmp_path, times):
    path, known, rng = tmp_path / "c", {}, random.Random(0)
    Collection.create(path, fingerprint="a" * 64, dimension=DIMENSION).close()
    return sum(kill_and_check(path, known, number, rng) for number in range(times))


def test_kill_loses_nothing_that_was_acknowledged(tmp_path):
    assert killed(tmp_path, 5) > 20


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """(path of a collection with an index and some items behind it, its vectors)."""
    path = tmp_path_factory.mktemp("indexed") / "c"
    vectors = unit_rows(np.random.default_rng(0).standard_normal((300, DIMENSION)))
    with Collection.create(path, fingerprint="a" * 64, dimension=DIMENSION) as collection:
        collection.add([Item(f"i{n}", vector, {"n": n}) for n, vector in enumerate(vectors[:250])])
        collection.reindex()
        collection.add(
            [Item(f"i{n}", vector, {"n": n}) for n, vector in enumerate(vectors[250:], 250)]
        )
    return path, vectors


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_index_is_made_again_and_never_served(indexed, tmp_path, seed, damage):
    path, vectors = indexed
    copy = shutil.copytree(path, tmp_path / "c")
    rng = random.Random(seed)
    file = rng.choice(
        sorted(path for path in (copy / "index" / "00000001").iterdir() if path.is_file())
    )
    content = bytearray(file.read_bytes())
    place = rng.randrange(len(content))
    if damage == "flipped":
        content[place] ^= 1 << rng.randrange(8)
    file.write_bytes(content[:place] if damage == "cut" else content)
    if damage == "gone":
        file.unlink()
    with Collection.open(copy, background=False) as collection:
        described = collection.describe()
        assert described.index_damaged
        assert (described.indexed, described.items) == (0, 300)
        check(collection, vectors)
        collection.reindex()
        assert not collection.describe().index_damaged
    with Collection.open(copy, background=False) as collection:
        assert (collection.describe().indexed, collection.describe().index_damaged) == (300, False)
        check(collection, vectors)


def check(collection, vectors):
    matches = collection.search(vectors, 3).matches
    assert [found[0].id for found in matches] == [f"i{n}" for n in range(300)]
    scores = np.sort(vectors.astype(np.float64) @ vectors.T, axis=1)[:, ::-1][:, :3]
    assert np.array([[match.similarity for match in found] for found in matches]) == pytest.approx(
        scores, abs=1e-5
    )


def test_a_damaged_index_is_made_again_in_the_background(indexed, tmp_path):
    copy = shutil.copytree(indexed[0], tmp_path / "c")
    (copy / "index" / "00000001" / "rows.npy").unlink()
    with Collection.open(copy) as collection:
        pass
    with Collection.open(copy) as collection:
        assert (collection.describe().indexed, collection.describe().index_damaged) == (300, False)


def test_a_generation_that_was_not_finished_is_not_there(indexed, tmp_path):
    copy = shutil.copytree(indexed[0], tmp_path / "c")
    (copy / "index" / "00000002.partial").mkdir()
    (copy / "index" / "00000002.partial" / "rows.npy").write_bytes(b"half")
    with Collection.open(copy, background=False) as collection:
        assert collection.describe().indexed == 250
        collection.reindex()
        check(collection, indexed[1])
    assert [path.name for path in (copy / "index").iterdir()] == ["00000002"]
