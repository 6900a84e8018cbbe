"""The processes of a machine share one copy of what is known of the training set."""

import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mlcd.errors import NotFound
from mlcd.training.data import maps
from mlcd.training.data.dataset import open_dataset
from mlcd.training.data.maps import open_maps, open_shared_dataset, write_maps
from mlcd.training.processes import Processes
from mlcd.world import World


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlcd" / "data"


def alone():
    return Processes(World(), torch.device("cpu"))


def assert_same(one, other):
    assert (one.num_unlabeled, one.num_missing) == (other.num_unlabeled, other.num_missing)
    assert (one.num_centers, one.names, one.weights) == (
        other.num_centers,
        other.names,
        other.weights,
    )
    for mine, theirs in zip(one.parts, other.parts, strict=True):
        assert list(mine.entries) == list(theirs.entries)
        assert mine.listing_digest == theirs.listing_digest
        assert mine.source.location == theirs.source.location
        for name in ("labels", "sha256", "scores"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        assert mine.source.read(mine.entries[3]) == theirs.source.read(theirs.entries[3])


@pytest.mark.parametrize("weighted", [False, True])
def test_a_mapped_data_set_is_the_joined_one(config, weighted, tmp_path):
    weights = ["loss.label_weights=scores"] if weighted else []
    run = config("run", *weights)
    joined = open_dataset(run)
    (tmp_path / "maps").mkdir()
    write_maps(joined, tmp_path / "maps")
    same = open_maps(run, tmp_path / "maps")
    for file in (tmp_path / "maps").iterdir():
        file.unlink()
    assert_same(same, joined)
    assert all("entries" not in vars(part.source) for part in same.parts)


def test_a_large_set_leaves_no_files(config, cache, monkeypatch, caplog, digits, tmp_path):
    monkeypatch.setattr(maps, "_MIN_MAPPED", 100)
    forgotten = cache / "of a process that was killed"
    forgotten.mkdir(parents=True)
    os.utime(forgotten, (0, 0))
    # The images without one digit: the process that joins says which labels are of no use.
    fewer = tmp_path / "fewer"
    shutil.copytree(digits, fewer, ignore=shutil.ignore_patterns("7"))
    run = config("run", f"data.images={fewer}")
    dataset = open_shared_dataset(run, alone())
    assert dataset.parts[0].listing is not None
    assert not dataset.parts[0].labels.flags.writeable
    assert_same(dataset, open_dataset(run))
    assert list(cache.iterdir()) == []
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert warnings[0] == warnings[1]
    assert "20 images labeled in" in warnings[0]


def test_a_small_set_needs_no_files(config, cache):
    assert open_shared_dataset(config("run"), alone()).parts[0].listing is None
    assert not cache.exists()


def test_an_error_of_the_join_is_the_run_s(config, cache, monkeypatch, tmp_path):
    monkeypatch.setattr(maps, "_MIN_MAPPED", 100)
    with pytest.raises(NotFound, match="no images at"):
        open_shared_dataset(config("run", f"data.images={tmp_path / 'gone'}"), alone())
    assert list(cache.iterdir()) == []


def test_without_a_cache_each_process_keeps_its_own(config, cache, monkeypatch, caplog):
    monkeypatch.setattr(maps, "_MIN_MAPPED", 100)
    cache.parent.parent.write_text("no folder")
    dataset = open_shared_dataset(config("run"), alone())
    assert dataset.parts[0].listing is None
    assert_same(dataset, open_dataset(config("run")))
    assert "set another cache directory with XDG_CACHE_HOME" in caplog.text


MEASURED = """
import gc, sys
from pathlib import Path
from mlcd.training.config import load_config
from mlcd.training.data import maps
from mlcd.training.data.maps import open_shared_dataset
from mlcd.training.processes import open_processes

def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private"))

def touched(part):
    sums = part.labels.sum() + part.sha256.sum()
    return sums + sum(len(key) for key in part.entries.keys())

small, large = (
    load_config("smoke", [f"data.images={images}", f"data.labels={labels}", "out=unused"])
    for images, labels in (sys.argv[1:3], sys.argv[3:5])
)
maps._MIN_MAPPED = 10_000
with open_processes("cpu", 1) as processes:
    warm = open_shared_dataset(small, processes)
    touched(warm.parts[0])
    gc.collect()
    before = private()
    dataset = open_shared_dataset(large, processes)
    touched(dataset.parts[0])
    gc.collect()
    processes.meet("here")  # a page that one process alone has touched counts as its own
    print(len(dataset), private() - before)
    processes.meet("the end")
"""


def write_set(folder, num):
    from mlcd.artifacts.draft import Draft
    from mlcd.artifacts.labels import write_part
    from mlcd.artifacts.manifest import Request
    from mlcd.types import Neighbors

    (folder / "images").mkdir(parents=True)
    keys = [f"{row:016d}" for row in range(num)]
    rows = pa.table({"key": keys, "image": pa.array([b"x"] * num, pa.binary())})
    pq.write_table(rows, folder / "images/0.parquet")
    ids = np.arange(8 * num, dtype=np.int32).reshape(-1, 8) % 1000
    with Draft(folder / "labels", Request("labels", {"num_centers": 1000, "top": 8})) as draft:
        found = Neighbors(ids, np.ones(ids.shape, np.float32))
        write_part(draft, 0, keys, [bytes(32)] * num, found)
        draft.publish()
    return [str(folder / "images/*.parquet"), str(folder / "labels")]


@pytest.mark.slow
def test_two_processes_hold_few_bytes_an_image_of_their_own(tmp_path, cache):
    num = 200_000
    arguments = [*write_set(tmp_path / "small", 1000), *write_set(tmp_path / "large", num)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURED, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    figures = [tuple(map(int, output.split()[-2:])) for output in outputs]
    assert [samples for samples, _ in figures] == [160_000] * 2
    assert sum(taken for _, taken in figures) < 50 * num, figures
    assert list(cache.iterdir()) == []
