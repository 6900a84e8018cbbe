"""The folder of a collection: made empty, and opened with all that it holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import refuse_full_disk, replacing, translate_os_errors
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

    facts: those that the collection is pinned to. damaged: its index was, and is left out.
    """

    ledger: Ledger
    growth: Growth
    facts: Mapping[str, Any]
    thumbnails: ThumbnailStore
    lock: CollectionLock
    writable: bool
    damaged: bool


def make_folder(path: Path, facts: Mapping[str, Any]) -> None:
    """Makes the folder of an empty collection, complete or not at all.

    Raises Conflict where something exists at `path`.
    """
    if path.exists():
        raise Conflict(f"{path} exists", remedy="give another name, or delete it first")
    if lacks_open_files():  # before anything exists that could not be removed either
        raise too_many_files()
    with translate_os_errors(path):
        try:
            write_empty(path, facts)
        except (OSError, MlcdError) as error:
            refuse_full_disk(error, path)
            raise


def write_empty(path: Path, facts: Mapping[str, Any]) -> None:
    """Writes an empty collection, published by one rename."""
    with replacing(path) as draft:
        draft.mkdir(parents=True)
        Ledger.create(draft / LEDGER, facts).rest()
        (draft / GENERATIONS).mkdir()
        (draft / LOCK).touch()


def open_folder(path: Path, thumbnails: ThumbnailStore, *, writable: bool) -> OpenedFolder:
    """Locks the folder, verifies its index and adds to it what it lacks.

    Raises what `Collection.open` raises.
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
            ledger.rest()
        thumbnails.close()
        lock.release()
        raise
    return OpenedFolder(ledger, growth, facts, thumbnails, lock, writable, damaged)


def _replay(ledger: Ledger, growth: Growth, rows: NDArray[np.int64], dimension: int) -> None:
    """Takes in the ledger's items: those in the index at their positions, the others
    behind them.
    """
    position_of = {row: position for position, row in enumerate(rows.tolist())}
    waiting = []
    for item in ledger.items():
        position = position_of.get(item.row)
        if position is not None:
            growth.revive(position, item)
        else:
            waiting.append(item)
    for start in range(0, len(waiting), _COPIED_ROWS):
        part = waiting[start : start + _COPIED_ROWS]
        for item, vector in zip(
            part, ledger.vectors([item.row for item in part], dimension), strict=True
        ):
            growth.append(item.id, item.row, vector, item.metadata)
