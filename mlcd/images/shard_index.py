"""What a shard holds, listed once: reading every header of a large set of tar shards, or every
image of parquet files for its size, again would delay each start.

Indexes stand in the user's cache directory, one file per shard, named by the shard's path. They are
read only while the file system states the same size, time and identity of the shard; a lost or
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

_VERSION: Final = "3"  # of the rules by which members are listed
_WORTH_KEEPING: Final = 1000  # images; fewer are listed in a fraction of a second
_WORTH_KEEPING_BYTES: Final = 1 << 24  # or less than so many bytes of them
_STATE: Final = b"state"
_CHANGES_SHOW_IN: Final = ("mtime", "ETag", "etag")
# Of a tar shard: an image's bytes are `size_bytes` from `offset` on.
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
    """members: the images of a shard, `size_bytes` and whatever columns its kind of shard has.
    damaged: it could be read up to some point only.
    """

    members: pa.Table
    damaged: bool


def list_once(
    filesystem: Any, path: str, list_members: Callable[[], Listing], *, folder: Path | None = None
) -> Listing:
    """What `list_members` finds, from the index where there is one of the shard as it is now.

    Damaged and small shards, and those on file systems that do not tell of changes, are listed
    every time.
    """
    state = file_state(filesystem, path)
    if state is None:
        return list_members()
    folder = folder or user_cache_path("mlcd", appauthor=False) / "shards"
    index = (
        folder
        / f"{hashlib.sha256(f'{filesystem.protocol}{path}'.encode(errors='replace')).hexdigest()}.parquet"
    )
    if (members := _read(index, state)) is not None:
        return Listing(members, damaged=False)
    listing = list_members()
    if not listing.damaged and _is_worth_keeping(listing.members):
        _write(index, state, listing.members)
    return listing


def file_state(filesystem: Any, path: str) -> bytes | None:
    """Another one after every change of the file; None where its file system does not tell."""
    try:
        info = filesystem.info(path)
    except OSError:
        return None
    if not any(name in info for name in _CHANGES_SHOW_IN):
        return None
    return (
        hashlib.sha256(f"{_VERSION} {sorted(info.items())}".encode(errors="replace"))
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


def _is_worth_keeping(members: pa.Table) -> bool:
    return (
        len(members) >= _WORTH_KEEPING
        or (pc.sum(members["size_bytes"]).as_py() or 0) >= _WORTH_KEEPING_BYTES
    )


def _write(index: Path, state: bytes, members: pa.Table) -> None:
    with suppress(OSError):  # no room or no right to write: the next start lists again
        index.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=index.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                pq.write_table(members.replace_schema_metadata({_STATE: state}), file)
            Path(temporary).replace(index)
        finally:
            Path(temporary).unlink(missing_ok=True)
