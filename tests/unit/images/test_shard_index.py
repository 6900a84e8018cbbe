"""Shards are listed once, and again when they change."""

import errno
import io
import os
import tarfile

import fsspec
import pyarrow as pa
import pytest

from mlcd.images import shard_index
from mlcd.images.shard_index import MEMBERS, Listing, list_once
from mlcd.images.sources import open_source

LOCAL = fsspec.filesystem("file")


def members(num, offset=0):
    rows = range(num)
    columns = [
        [f"é{row}" for row in rows],
        ["cat" if row % 2 else None for row in rows],
        [offset + row for row in rows],
        [7] * num,
    ]
    return pa.table(columns, schema=MEMBERS)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "s.tar"
    path.write_bytes(b"as it is")
    return path


def found(shard, listing, folder):
    """Returns the listing, and true if the shard had to be listed."""
    calls = []
    result = list_once(LOCAL, str(shard), lambda: calls.append(1) or listing, folder=folder)
    return result, bool(calls)


def test_a_large_shard_is_listed_once_and_again_when_it_changes(shard, tmp_path):
    first, second = (
        Listing(members(1000), damaged=False),
        Listing(members(1001, offset=5), damaged=False),
    )
    assert found(shard, first, tmp_path / "cache") == (first, True)
    assert found(shard, second, tmp_path / "cache") == (first, False)
    os.utime(shard, (1, 1))
    assert found(shard, second, tmp_path / "cache") == (second, True)
    assert found(shard, first, tmp_path / "cache") == (second, False)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_small_and_damaged_shards_are_not_remembered(shard, tmp_path):
    for listing in (Listing(members(999), damaged=False), Listing(members(2000), damaged=True)):
        for _ in range(2):
            assert found(shard, listing, tmp_path / "cache") == (listing, True)


def test_a_damaged_index_is_built_again(shard, tmp_path):
    listing = Listing(members(1000), damaged=False)
    found(shard, listing, tmp_path / "cache")
    (index,) = (tmp_path / "cache").iterdir()
    index.write_bytes(index.read_bytes()[:-20])
    assert found(shard, listing, tmp_path / "cache") == (listing, True)
    assert found(shard, listing, tmp_path / "cache") == (listing, False)


def test_without_a_place_to_write_shards_are_listed_every_time(shard, tmp_path):
    (tmp_path / "file").write_text("in the way")
    listing = Listing(members(1000), damaged=False)
    for _ in range(2):
        assert found(shard, listing, tmp_path / "file" / "cache") == (listing, True)


def test_a_disk_that_fills_while_the_index_is_written_keeps_nothing_of_it(
    shard, tmp_path, monkeypatch
):
    def fill(_table, file):
        file.write(b"begun")
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(shard_index.pq, "write_table", fill)
    listing = Listing(members(1000), damaged=False)
    assert found(shard, listing, tmp_path / "cache") == (listing, True)
    assert not list((tmp_path / "cache").iterdir())


def test_a_file_system_that_tells_nothing_of_changes_is_listed_every_time(tmp_path):
    class Silent:
        protocol = "silent"

        def info(self, path):
            return {"name": path, "size": 8}

    listing = Listing(members(1000), damaged=False)
    for _ in range(2):
        calls = []
        list_once(
            Silent(), "s.tar", lambda calls=calls: calls.append(1) or listing, folder=tmp_path
        )
        assert calls


def test_a_source_lists_the_same_from_its_index(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_index, "_MIN_INDEXED_IMAGES", 3)
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for name in ("a.png", "b.png", "b.jpg", "sub/c.png"):
            for suffix, data in ((name, name.encode()), (f"{name.rsplit('.', 1)[0]}.cls", b"cat")):
                member = tarfile.TarInfo(suffix)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    listed = open_source(str(tmp_path / "*.tar"))
    first = listed.entries
    assert list((tmp_path / "cache").rglob("*.parquet"))
    monkeypatch.setattr("tarfile.open", None)
    again = open_source(str(tmp_path / "*.tar"))
    assert list(again.entries) == list(first)
    assert [again.read(entry) for entry in again.entries] == [
        b"a.png",
        b"b.png",
        b"b.jpg",
        b"sub/c.png",
    ]
