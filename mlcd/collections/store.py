"""All collections of one folder, by name."""

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Final, Self

from mlcd.collections.collection import DEFAULT_RECALL, LEDGER, Collection, sync_path
from mlcd.collections.items import check_name
from mlcd.errors import Conflict, NotFound
from mlcd.types import Fingerprint

_LEFTOVERS: Final = (".*.tmp", ".*.deleted")


class Collections:
    """Opens each collection once and closes them all. Every method may be called from many threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, Collection] = {}
        self._changing = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Those in `folder`, which is made where it is missing, all verified and ready.

        Raises the error of the first that cannot be opened.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in _LEFTOVERS:
            for path in folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        store = cls(folder)
        try:
            for ledger in sorted(folder.glob(f"*/{LEDGER}")):
                store._opened[ledger.parent.name] = Collection.open(ledger.parent)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        with self._changing:
            for collection in self._opened.values():
                collection.close()
            self._opened.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        return sorted(self._opened.copy())

    def get(self, name: str) -> Collection:
        """Raises NotFound."""
        collection = self._opened.get(check_name(name))
        if collection is None:
            raise NotFound("there is no such collection")
        return collection

    def create(
        self, name: str, *, fingerprint: Fingerprint, dimension: int, recall: float = DEFAULT_RECALL
    ) -> Collection:
        """The empty collection `name`, or the one that is there for the same model.

        Raises Conflict where it holds embeddings of another model, dimension or recall.
        """
        check_name(name)
        with self._changing:
            found = self._opened.get(name)
            if found is None:
                path = self._folder / name
                self._opened[name] = found = Collection.create(
                    path, fingerprint=fingerprint, dimension=dimension, recall=recall
                )
            if (found.fingerprint, found.dimension, found.recall_target) != (fingerprint, dimension, recall):
                raise Conflict(
                    f"the collection {name} is there, for another model, dimension or recall",
                    remedy="give another name, or delete it first",
                )
            return found

    def delete(self, name: str) -> None:
        """With all its items, for good; gone from the disk's view at once. Raises NotFound."""
        check_name(name)
        with self._changing:
            collection = self._opened.pop(name, None)
            if collection is None:
                raise NotFound("there is no such collection")
            collection.close()
            dead = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".deleted", dir=self._folder))
            collection.path.rename(dead)  # onto an empty folder: one step
            sync_path(self._folder)
            shutil.rmtree(dead, ignore_errors=True)
