"""Entries in columns behave as the list of objects that they stand for."""

import hashlib
import subprocess
import sys
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcd.images import entries as module
from mlcd.images.entries import Entries, Entry
from mlcd.images.sources import open_source
from mlcd.keys import normalize_class

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
ENTRY = st.builds(
    Entry,
    TEXT,
    st.none() | TEXT.map(normalize_class),
    st.integers(0, 2**40),
    st.tuples(st.none() | TEXT, st.binary(max_size=3)),
)
TABLES = st.lists(st.lists(ENTRY, max_size=4), max_size=4)


def columns(entries):
    return pa.table(
        {
            "key": pa.array([entry.key for entry in entries], pa.string()),
            "class_name": pa.array([entry.class_name for entry in entries], pa.string()),
            "size_bytes": pa.array([entry.size_bytes for entry in entries], pa.int64()),
            "path": pa.array([entry.locator[0] for entry in entries], pa.string()),
            "offset": pa.array([entry.locator[1] for entry in entries], pa.binary()),
        }
    )


def both(tables):
    return Entries.of(columns(table) for table in tables), [
        entry for table in tables for entry in table
    ]


def assert_alike(entries, oracle):
    assert len(entries) == len(oracle)
    assert list(entries) == oracle
    assert [entries[place] for place in range(len(oracle))] == oracle
    assert list(entries.keys()) == [entry.key for entry in oracle]
    assert list(entries.class_names()) == [entry.class_name for entry in oracle]
    assert list(entries.sizes_bytes()) == [entry.size_bytes for entry in oracle]
    if oracle:
        assert entries[-1] == oracle[-1]
    for place in (len(oracle), -len(oracle) - 1):
        with pytest.raises(IndexError):
            entries[place]


@given(TABLES)
def test_they_are_the_list_in_order(tables):
    assert_alike(*both(tables))


@given(TABLES, st.slices(16), st.slices(8))
def test_slices_of_slices_are_those_of_the_list(tables, first, second):
    entries, oracle = both(tables)
    assert_alike(entries[first], oracle[first])
    assert_alike(entries[first][second], oracle[first][second])


@given(TABLES, st.data())
def test_selections_are_those_of_the_list(tables, data):
    entries, oracle = both(tables)
    places = data.draw(st.lists(st.integers(0, len(oracle) - 1)) if oracle else st.just([]))
    selected, expected = (
        entries.select(np.array(places, dtype=np.int64)),
        [oracle[place] for place in places],
    )
    assert_alike(selected, expected)
    assert_alike(selected[1::2], expected[1::2])
    assert_alike(selected.select(np.arange(len(places))[::-1]), expected[::-1])


@given(st.lists(TEXT, unique=True, max_size=12), st.lists(TEXT, max_size=8), st.slices(12))
def test_keys_are_found_where_they_stand(own, others, part):
    entries, _ = both(
        [[Entry(key, None, 0, (None, b"")) for key in half] for half in (own[:5], own[5:])]
    )
    wanted = pa.chunked_array([own[::2], others], pa.large_string())
    for some, names in ((entries, own), (entries[part], own[part]), (entries[::-1], own[::-1])):
        places = {key: place for place, key in enumerate(names)}
        assert some.find(wanted).tolist() == [places.get(key, -1) for key in wanted.to_pylist()]


@pytest.mark.parametrize("equal_hashes", [False, True])
@given(keys=st.lists(st.sampled_from("abcdefghé"), max_size=8))
def test_the_first_repeated_key_is_named(equal_hashes, keys):
    entries, _ = both([[Entry(key, None, 0, (None, b"")) for key in keys]])
    expected = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
    with pytest.MonkeyPatch.context() as patch:
        if equal_hashes:  # distinct keys may have one hash
            patch.setattr(module, "hash", lambda key: 7, raising=False)
        assert entries.find_repeated_key() == expected


def test_more_entries_than_are_read_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 3)
    entries, oracle = both(
        [[Entry(f"{n}", None, n, (None, b"")) for n in range(start, start + 4)] for start in (0, 4)]
    )
    assert_alike(entries, oracle)
    assert_alike(entries[2:7], oracle[2:7])


def test_an_entry_holds_plain_values_as_it_goes_to_other_processes(tmp_path, digits):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("3/0003.png", (digits / "3" / "0003.png").read_bytes())
    pq.write_table(pa.table({"image": [b"x"], "label": [3]}), tmp_path / "a.parquet")
    for location in (digits, tmp_path / "a.zip", tmp_path / "a.parquet"):
        entry = open_source(str(location)).entries[0]
        assert (type(entry.key), type(entry.class_name), type(entry.size_bytes)) == (str, str, int)
        assert {type(value) for value in entry.locator} <= {str, bytes, int, type(None)}


def test_the_listing_digest_is_over_keys_and_sizes_as_ever(digits):
    source = open_source(str(digits))
    lines = "".join(f"{entry.key}\0{entry.size_bytes}\0" for entry in list(source.entries))
    assert source.listing_digest() == hashlib.sha256(lines.encode()).hexdigest()


MEASURED = """
import gc, sys, tracemalloc
import pyarrow as pa
from pathlib import Path
from mlcd.artifacts.labels import LabelTable
from types import SimpleNamespace
from mlcd.training.data.data_config import MixedSource
from mlcd.training.head.loss_config import LossConfig
from mlcd.training.data.dataset import _join

mixed = MixedSource(images=sys.argv[1], labels=sys.argv[2])
config = SimpleNamespace(data=SimpleNamespace(hold_out=0.1), loss=LossConfig())

def join():
    return _join(mixed, LabelTable.open(Path(sys.argv[2])), config)

join()  # what modules take that are imported on the way does not count
tracemalloc.start()
part, *counts = join()
assert counts == [0, 0], counts
gc.collect()
held, peak = tracemalloc.get_traced_memory()
print(len(part), held + pa.total_allocated_bytes(), peak + pa.default_memory_pool().max_memory())
"""


def test_listing_and_joining_take_few_bytes_an_image(tmp_path):
    """A list of objects, joined in dicts, took more than 800 bytes each, and as many at the worst
    moment.
    """
    from mlcd.artifacts.draft import Draft
    from mlcd.artifacts.labels import write_part
    from mlcd.artifacts.manifest import Request
    from mlcd.types import Neighbors

    num, num_files = 50_000, 10
    (tmp_path / "images").mkdir()
    with Draft(tmp_path / "labels", Request("labels", {"num_centers": 1000})) as draft:
        for part in range(num_files):
            keys = [f"{part:05d}/{row:09d}" for row in range(num // num_files)]
            pq.write_table(
                pa.table({"key": keys, "image": [b"x"] * len(keys)}),
                tmp_path / f"images/{part:05d}.parquet",
            )
            ids = np.arange(8 * len(keys), dtype=np.int32).reshape(-1, 8) % 1000
            write_part(
                draft,
                part,
                keys,
                [bytes(32)] * len(keys),
                Neighbors(ids, np.ones(ids.shape, np.float32)),
            )
        draft.publish()
    command = [
        sys.executable,
        "-c",
        MEASURED,
        str(tmp_path / "images" / "*.parquet"),
        str(tmp_path / "labels"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    samples, held, peak = map(int, result.stdout.split())
    assert samples == 45_000
    # Columns 53, 15 of them the key, and of nine images in ten 8 for the selection, 32 for labels,
    # 32 for the SHA-256.
    assert held < 125 * num
    assert peak < 350 * num
