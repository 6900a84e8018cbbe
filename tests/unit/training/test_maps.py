"""The processes of a machine share one copy of what is known of the training set."""

import os
import shutil

import numpy as np
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
