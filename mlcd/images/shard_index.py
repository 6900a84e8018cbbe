"""Caches the listing of a shard, so that tar headers, and the sizes of images in parquet files, are
read only when the shard is opened for the first time.

Indexes are in the user's cache directory, one file per shard, named by the shard's path. An index
is valid while the file system reports the same size, time and identity of the shard; a lost or
damaged index is built again.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from platformdirs import user_cache_path

_VERSION: Final = "6"  # version of the rules for listing members
# Smaller shards are listed in a fraction of a second, and get no index.
_MIN_INDEXED_IMAGES: Final = 1000
_MIN_INDEXED_BYTES: Final = 1 << 24
_STATE: Final = b"state"
_ETAGS: Final = ("ETag", "etag")
# The members of a tar shard; an image's bytes are the `size_bytes` bytes from `offset`.
MEMBERS: Final = pa.schema(
    [
        ("name", pa.string()),
        ("class_name", pa.string()),
        ("offset", pa.int64()),
        ("size_bytes", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Listing:
    """The contents of a shard.

    members: its images, with `size_bytes` and further columns by the kind of shard. damaged:
    whether only a first part of the shard could be read.
    """

    members: pa.Table
    damaged: bool


def list_once(
    filesystem: Any, path: str, list_members: Callable[[], Listing], *, folder: Path | None = None
) -> Listing:
    """Returns the result of `list_members`, or the index if the shard has not changed since.

    Damaged shards, small shards, and shards on file systems that do not report changes are listed
    every time.
    """
    state = file_state(filesystem, path)
    if state is None:
        return list_members()
    folder = folder or user_cache_path("mlcd", appauthor=False) / "shards"
    name = hashlib.sha256(f"{filesystem.protocol}{path}".encode(errors="replace")).hexdigest()
    index = folder / f"{name}.parquet"
    if (members := _read(index, state)) is not None:
        return Listing(members, damaged=False)
    listing = list_members()
    if not listing.damaged and _is_worth_indexing(listing.members):
        _write(index, state, listing.members)
    return listing


def file_state(filesystem: Any, path: str) -> bytes | None:
    """Returns a value that differs after every change of the file; None if its file system does not
    report changes.
    """
    try:
        info = filesystem.info(path)
    except OSError:
        return None
    etag = next((info[name] for name in _ETAGS if info.get(name)), None)
    if etag is None and "mtime" not in info:
        return None
    # With an ETag, only size and ETag count: a store's other fields differ between a stat and a
    # listing of the same file.
    facts = info if etag is None else {"size": info["size"], "etag": str(etag).strip('"')}
    return (
        hashlib.sha256(f"{_VERSION} {sorted(facts.items())}".encode(errors="replace"))
        .hexdigest()
        .encode()
    )


def _read(index: Path, state: bytes) -> pa.Table | None:
    try:
        table = pq.read_table(index)
    except (OSError, pa.ArrowException):
        return None
    if (table.schema.metadata or {}).get(_STATE) != state:
        return None
    return table.replace_schema_metadata(None)


def _is_worth_indexing(members: pa.Table) -> bool:
    return (
        len(members) >= _MIN_INDEXED_IMAGES
        or (pc.sum(members["size_bytes"]).as_py() or 0) >= _MIN_INDEXED_BYTES
    )


def _write(index: Path, state: bytes, members: pa.Table) -> None:
    with suppress(OSError):  # without space or permission, the next start lists the shard again
        index.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=index.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                pq.write_table(members.replace_schema_metadata({_STATE: state}), file)
            Path(temporary).replace(index)
        finally:
            Path(temporary).unlink(missing_ok=True)
