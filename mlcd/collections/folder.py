"""Creates the folder of an empty collection, and opens the folder of an existing one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import raise_if_disk_full, replacing, translate_os_errors
from mlcd.collections.generation import open_newest
from mlcd.collections.growth import Growth
from mlcd.collections.ledger import Ledger
from mlcd.collections.locks import LOCK, CollectionLock, lock_collection
from mlcd.collections.thumbnail_store import ThumbnailStore
from mlcd.errors import Conflict, MlcdError
from mlcd.too_many_files import lacks_open_files, too_many_files

LEDGER: Final = "items.sqlite"
GENERATIONS: Final = "index"
_COPIED_ROWS: Final = 8192


@dataclass(frozen=True)
class OpenedFolder:
    """An open folder.

    facts: fixed properties of the collection. damaged: the index was damaged and is not used.
    """

    ledger: Ledger
    growth: Growth
    facts: Mapping[str, Any]
    thumbnails: ThumbnailStore
    lock: CollectionLock
    writable: bool
    damaged: bool


def make_folder(path: Path, facts: Mapping[str, Any]) -> None:
    """Creates the folder of an empty collection, atomically.

    Raises Conflict if `path` exists.
    """
    if path.exists():
        raise Conflict(f"{path} exists", remedy="give another name, or delete it first")
    if lacks_open_files():  # checked first: without descriptors, a draft could not be removed
        raise too_many_files()
    with translate_os_errors(path):
        try:
            write_empty(path, facts)
        except (OSError, MlcdError) as error:
            raise_if_disk_full(error, path)
            raise


def write_empty(path: Path, facts: Mapping[str, Any]) -> None:
    """Writes an empty collection and publishes it by one rename."""
    with replacing(path) as draft:
        draft.mkdir(parents=True)
        Ledger.create(draft / LEDGER, facts).close_until_used()
        (draft / GENERATIONS).mkdir()
        (draft / LOCK).touch()


def open_folder(path: Path, thumbnails: ThumbnailStore, *, writable: bool) -> OpenedFolder:
    """Locks the folder, verifies its index and loads the items of the ledger.

    Raises the errors of `Collection.open`.
    """
    lock = lock_collection(path, writable=writable)
    ledger: Ledger | None = None
    try:
        ledger = Ledger.open(path / LEDGER, read_only=not writable)
        facts = ledger.facts()
        dimension = facts["dimension"]
        generation, damaged = open_newest(
            path / GENERATIONS, dimension=dimension, fingerprint=facts["fingerprint"]
        )
        growth = Growth(generation, dimension)
        _replay(ledger, growth, generation.rows, dimension)
        thumbnails.open(growth.rows())
    except BaseException:
        if ledger is not None:
            ledger.close_until_used()
        thumbnails.close()
        lock.release()
        raise
    return OpenedFolder(ledger, growth, facts, thumbnails, lock, writable, damaged)


def _replay(ledger: Ledger, growth: Growth, rows: NDArray[np.int64], dimension: int) -> None:
    """Loads the ledger's items: indexed items at their positions, others appended after them.

    rows: rows of the index, by position.
    """
    position_of = {row: position for position, row in enumerate(rows.tolist())}
    unindexed = []
    for item in ledger.items():
        position = position_of.get(item.row)
        if position is not None:
            growth.revive(position, item)
        else:
            unindexed.append(item)
    for start in range(0, len(unindexed), _COPIED_ROWS):
        part = unindexed[start : start + _COPIED_ROWS]
        for item, vector in zip(
            part, ledger.vectors([item.row for item in part], dimension), strict=True
        ):
            growth.append(item.id, item.row, vector, item.metadata)
