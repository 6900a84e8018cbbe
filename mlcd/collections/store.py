"""The collections of one folder, by name."""

import logging
import os
import shutil
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from mlcd.artifacts.manifest import draft_path
from mlcd.collections.collection import Collection
from mlcd.collections.folder import GENERATIONS, LEDGER
from mlcd.collections.item import check_name, is_name
from mlcd.collections.locks import LOCK
from mlcd.collections.open_ledgers import OpenLedgers
from mlcd.collections.port import DEFAULT_RECALL
from mlcd.collections.search_checks import check_same
from mlcd.collections.thumbnail_store import DEFAULT_MAX_BYTES
from mlcd.errors import Conflict, MlcdError, NotFound, TooManyOpenFiles
from mlcd.too_many_files import explain_open_files
from mlcd.types import Fingerprint

_DRAFT: Final = draft_path(Path("name")).suffix
# Backoff before opening a collection again that could not be opened: reading a large one is slow.
_RETRY_S: Final = 10.0
_log = logging.getLogger("mlcd.collections")
_LEFTOVERS: Final = (".*.tmp", ".*.deleted")


class TooManyCollections(Conflict):
    """The limit on the number of collections is reached."""

    limit: Final = "max_collections"

    def __init__(self, max_collections: int) -> None:
        super().__init__(
            f"{self.limit} allows no more than {max_collections} collections",
            remedy="delete one first",
        )


class CollectionUnusable(Conflict):
    """A collection exists but cannot be opened. The reason does not contain the folder's path."""

    name = "collection-unusable"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"the collection {name} exists but cannot be opened: {reason}",
            remedy="it is tried again every few seconds",
        )


class Collections:
    """The collections of one folder, each opened once. All methods are thread-safe.

    Memory and the limit on open files bound their number: each collection uses one file descriptor
    for its lock, and the most recently used ones three more for their ledgers.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writable: bool,
        max_collections: int | None,
        max_thumbnail_bytes: int,
    ) -> None:
        self.writable, self._max_thumbnail_bytes = writable, max_thumbnail_bytes
        self._folder, self._ledgers, self._max_collections = folder, OpenLedgers(), max_collections
        self._opened: dict[str, Collection] = {}
        self._refused_until_s: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._closed = False
        self._changing = threading.Lock()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        read_only: bool = False,
        max_collections: int | None = None,
        max_thumbnail_bytes: int = DEFAULT_MAX_BYTES,
    ) -> Self:
        """Opens and verifies all collections in `folder`; creates a missing folder.

        read_only, max_thumbnail_bytes: see `Collection.open`. max_collections: limit for `create`;
        existing collections are opened even beyond it. Collections that cannot be opened are
        `unusable`. Raises Conflict if another process has one of them open.
        """
        writable = not read_only and _is_writable(folder)
        if writable:
            folder.mkdir(parents=True, exist_ok=True)
            for pattern in _LEFTOVERS:
                for path in folder.glob(pattern):
                    shutil.rmtree(path, ignore_errors=True)
        store = cls(
            folder,
            writable=writable,
            max_collections=max_collections,
            max_thumbnail_bytes=max_thumbnail_bytes,
        )
        try:
            store.find_new()
        except BaseException:
            store.close()
            raise
        return store

    def find_new(self) -> None:
        """Opens collections that were put into the folder; those that cannot be opened are
        `unusable`.

        Raises Conflict if another process has one open: two servers would share the folder.
        """
        with self._changing:
            for name in self._names_in_folder():
                if name in self._opened:
                    continue
                with suppress(CollectionUnusable):
                    self._open_or_refuse(name)

    def unusable(self) -> dict[str, str]:
        """Returns the reasons why collections of the folder cannot be opened, sorted by name."""
        return {
            name: reason
            for name, reason in sorted(self._reasons.copy().items())
            if (self._folder / name).is_dir()
        }

    def _names_in_folder(self) -> list[str]:
        names = {
            path.parent.name
            for part in (LEDGER, LOCK, GENERATIONS)
            for path in self._folder.glob(f"*/{part}")
        }
        return sorted(
            name for name in names if not name.startswith(".") and not name.endswith(_DRAFT)
        )

    @explain_open_files()
    def find_arrivals(self) -> list[str]:
        """Returns the names of collections in the folder that are not open yet."""
        return [name for name in self._names_in_folder() if self.has_arrived(name)]

    def has_arrived(self, name: str) -> bool:
        """Returns whether a collection is in the folder and not open yet."""
        return (
            is_name(name)
            and name not in self._opened
            and any((self._folder / name / part).exists() for part in (LEDGER, LOCK, GENERATIONS))
        )

    def open_arrived(self, name: str) -> None:
        """Opens a collection if it has arrived; slow.

        Raises Conflict if it cannot be opened, and again without a retry for `_RETRY_S` seconds.
        """
        with self._changing:
            if self._closed or not self.has_arrived(name):
                return
            if time.monotonic() < self._refused_until_s.get(name, 0.0):
                raise CollectionUnusable(name, self._reasons[name])
            try:
                self._open_or_refuse(name)
            except CollectionUnusable:
                raise
            except Conflict as error:
                raise self._refuse(name, error) from error
            _log.info("the collection %s has arrived and is open", name)

    def open_all_arrived(self) -> None:
        """Opens all collections that have arrived, and skips those that cannot be opened."""
        for name in self.find_arrivals():
            with suppress(Conflict, TooManyOpenFiles):
                self.open_arrived(name)

    def close(self, *, finish: bool = True) -> None:
        """Closes all collections; finish: see `Collection.close`."""
        with self._changing:
            self._closed = True
            for collection in self._opened.values():
                collection.close(finish=finish)
            self._opened.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        return sorted(self._opened.copy())

    def all(self) -> dict[str, Collection]:
        """Returns the open collections, sorted by name."""
        return dict(sorted(self._opened.copy().items()))

    def find(self, name: str) -> Collection | None:
        return self._opened.get(check_name(name))

    def get(self, name: str) -> Collection:
        """Returns a collection; raises NotFound."""
        collection = self.find(name)
        if collection is None:
            raise NotFound("no such collection")
        return collection

    def create(
        self, name: str, *, fingerprint: Fingerprint, dimension: int, recall: float | None = None
    ) -> tuple[Collection, bool]:
        """Returns the collection `name` and whether it was created now.

        recall: target; None accepts that of an existing collection, and is 0.99 for a new one.
        Raises Conflict if the collection exists with another model, dimension or recall, if the
        folder is read-only, or if the limit is reached.
        """
        check_name(name)
        with self._changing:
            collection, path = self._opened.get(name), self._folder / name
            is_new = collection is None and not (path / LEDGER).is_file()
            if is_new:
                self._check_writable()
                self._check_room()
                if path.exists():
                    raise Conflict(
                        f"{name} exists in the folder and is not a collection",
                        remedy="give another name",
                    )
                recall = DEFAULT_RECALL if recall is None else recall
                collection = Collection.create(
                    path,
                    fingerprint=fingerprint,
                    dimension=dimension,
                    recall=recall,
                    ledgers=self._ledgers,
                    max_thumbnail_bytes=self._max_thumbnail_bytes,
                )
                self._opened[name] = collection
            elif collection is None:  # another process put it there
                collection = self._open_or_refuse(name)
            check_same(
                name,
                (collection.fingerprint, collection.dimension, collection.recall_target),
                (fingerprint, dimension, recall),
            )
            return collection, is_new

    @explain_open_files()
    def delete(self, name: str) -> None:
        """Deletes a collection with all its items; one rename removes its name from the folder.

        Raises NotFound, Conflict, TooManyOpenFiles.
        """
        check_name(name)
        self._check_writable()
        with self._changing:
            collection = self._opened.get(name)
            if collection is None:
                raise NotFound("no such collection")
            # Opened first: it can fail, and the steps below cannot be undone.
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                del self._opened[name]
                collection.close(finish=False)
                dead = self._folder / f".{name}.{uuid.uuid4().hex}.deleted"
                collection.path.rename(dead)
                os.fsync(folder)
            finally:
                os.close(folder)
        shutil.rmtree(dead, ignore_errors=True)

    def _open_or_refuse(self, name: str) -> Collection:
        """Opens a collection.

        Raises CollectionUnusable, and Conflict if another process has it open.
        """
        try:
            self._opened[name] = Collection.open(
                self._folder / check_name(name),
                read_only=not self.writable,
                ledgers=self._ledgers,
                max_thumbnail_bytes=self._max_thumbnail_bytes,
            )
        except (TooManyOpenFiles, Conflict):  # not an error of the collection
            raise
        except (MlcdError, OSError) as error:
            raise self._refuse(name, error) from error
        self._refused_until_s.pop(name, None)
        self._reasons.pop(name, None)
        return self._opened[name]

    def _refuse(self, name: str, error: MlcdError | OSError) -> CollectionUnusable:
        """Records why a collection cannot be opened, and logs each new reason once."""
        reason = str(error).replace(f"{self._folder}{os.sep}", "")
        if self._reasons.get(name) != reason:
            _log.warning("the collection %s cannot be opened: %s", name, error)
        self._reasons[name] = reason
        self._refused_until_s[name] = time.monotonic() + _RETRY_S
        return CollectionUnusable(name, reason)

    def _check_room(self) -> None:
        if self._max_collections is not None and len(self._opened) >= self._max_collections:
            raise TooManyCollections(self._max_collections)

    def _check_writable(self) -> None:
        if not self.writable:
            raise Conflict(
                "collections are open for searches only",
                remedy="give a writable folder, and open it in one process",
            )


def _is_writable(folder: Path) -> bool:
    """Returns whether the folder is writable or can be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
