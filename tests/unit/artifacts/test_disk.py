"""A replacement is on the disk before its name is."""

import errno
import os
import resource

import numpy as np
import pytest
import torch

from mlcd.artifacts.disk import replacing, translate_os_errors, write_synced
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.collections.parquet_items import write_parquet
from mlcd.errors import TooManyOpenFiles
from mlcd.export.triton import CONFIG_FILE, update_config
from mlcd.pipelines.index import duplicates
from mlcd.pipelines.ownership import OWNER, claim
from mlcd.progress import Reporter
from mlcd.too_many_files import lacks_open_files
from mlcd.training.bad_batch import keep_bad_batch
from mlcd.training.data.loader import Batch, StepBatches
from mlcd.training.step import Meters
from mlcd.training.telemetry.step_logs import MetricsLog
from tests.unit.disk_order import check_durable, recorded


def collection_at(path):
    with Collection.create(path, fingerprint="a" * 64, dimension=2, background=False) as collection:
        collection.add([Item("a", np.array([1.0, 0])), Item("b", np.array([1.0, 0]))])
    return path


def bad_batch(folder):
    image = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    batch = Batch(image, torch.zeros(1, 1, dtype=torch.int64), np.zeros(1, np.int64), ("a",), 0)
    number = torch.tensor(torch.nan)
    keep_bad_batch(
        folder / "kept", StepBatches(7, (batch,), 0.0), Meters(number, {}, number, number, 0.1)
    )
    return folder / "kept", ("batch.safetensors", "batch.json")


def near_duplicates(folder):
    duplicates(
        collection_at(folder / "c"), folder / "groups.jsonl", Reporter("silent"), similarity=0.9
    )
    return folder / "groups.jsonl", ()


def triton_config(folder):
    with Draft(folder / "m" / "1", Request("triton", {"version": 1}, (), "a" * 64)) as draft:
        with draft.write(CONFIG_FILE) as path:
            path.write_text("platform: 'x'")
        draft.publish()
    update_config(folder / "m")
    return folder / "m" / CONFIG_FILE, ()


def claimed(folder):
    claim(folder / "mine", "me")
    return folder / "mine", (OWNER,)


def new_collection(folder):
    return collection_at(folder / "c"), ()


def exported(folder):
    with Collection.open(collection_at(folder / "c"), read_only=True) as collection:
        write_parquet(collection, folder / "c.parquet", meter=_Meter())
    return folder / "c.parquet", ()


def cut_back(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    MetricsLog(folder, resume_step=1)
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'
    return folder / "metrics.jsonl", ()


class _Meter:
    def advance(self, num=1, **facts):
        pass


@pytest.mark.parametrize(
    "make", [bad_batch, near_duplicates, triton_config, claimed, new_collection, exported, cut_back]
)
def test_what_appears_by_a_rename_is_synced_before_and_its_folder_after(tmp_path, make):
    with recorded() as steps:
        path, files = make(tmp_path)
    check_durable(steps, path, files=files)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_fails_replaces_nothing_and_leaves_nothing(tmp_path, is_folder):
    write_synced(tmp_path / "x", b"before")

    def fail(path):
        if is_folder:
            path.mkdir()
            path /= "part"
        path.write_bytes(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError), replacing(tmp_path / "x") as path:
        fail(path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"before"}
    with pytest.raises(NotADirectoryError), replacing(tmp_path / "x") as path:
        path.mkdir()  # no folder takes the place of a file
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_no_full_disk(tmp_path, number):
    with pytest.raises(TooManyOpenFiles, match="ulimit -n"), translate_os_errors(tmp_path):
        raise OSError(number, os.strerror(number))


def test_a_lack_of_descriptors_is_seen():
    assert not lacks_open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        assert lacks_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
