"""The part of a store behind a URL that is the same for all of them: its collections, by name."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from mlcd.collections.item import check_name, is_name
from mlcd.collections.port import DEFAULT_RECALL
from mlcd.collections.remote_collection import RemoteCollection
from mlcd.collections.search_checks import check_creation, check_same
from mlcd.errors import NotFound
from mlcd.types import Fingerprint


class Pinned(Protocol):
    """The facts about one collection that a store keeps beside its items.

    identity: that of the collection and of no other that had or will have its name.
    """

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> int | str: ...
    @property
    def fingerprint(self) -> Fingerprint: ...
    @property
    def dimension(self) -> int: ...
    @property
    def recall(self) -> float: ...


P = TypeVar("P", bound=Pinned)
C = TypeVar("C", bound=RemoteCollection)


class RemoteCollections(ABC, Generic[P, C]):
    """A store that knows its collections. Every method may be called from many threads; see
    `Collections` for what is not said here.

    Other servers may create and delete collections meanwhile: they are found when one is named.
    """

    def __init__(self) -> None:
        self._opened: dict[str, tuple[int | str, C]] = {}
        self._changing = threading.Lock()

    @property
    def writable(self) -> bool:
        return True

    def close(self, *, finish: bool = True) -> None:
        for collection in self.all().values():
            collection.close(finish=finish)
        self._opened.clear()
        self._disconnect()

    def find_new(self) -> None:
        """Opens what other servers have created, and forgets what they have deleted."""
        for name in self.find_arrivals():
            self.open_arrived(name)

    def find_arrivals(self) -> list[str]:
        identities = self._identities()
        with self._changing:
            for name, (identity, _) in list(self._opened.items()):
                if identities.get(name) != identity:
                    del self._opened[name]
            return sorted(identities.keys() - self._opened.keys())

    def has_arrived(self, name: str) -> bool:
        return is_name(name) and name not in self._opened and self._find(name) is not None

    def open_arrived(self, name: str) -> None:
        pinned = self._find(name)
        if pinned is not None:
            self._open(pinned)

    def open_all_arrived(self) -> None:
        self.find_new()

    def unusable(self) -> Mapping[str, str]:
        return {}

    def all(self) -> Mapping[str, C]:
        return {name: collection for name, (_, collection) in sorted(self._opened.copy().items())}

    def find(self, name: str) -> C | None:
        opened = self._opened.get(check_name(name))
        return None if opened is None else opened[1]

    def get(self, name: str) -> C:
        collection = self.find(name)
        if collection is None:
            raise NotFound("no such collection")
        return collection

    def create(
        self, name: str, *, fingerprint: Fingerprint, dimension: int, recall: float | None = None
    ) -> tuple[C, bool]:
        check_name(name)
        is_new = False
        pinned = self._find(name)
        if pinned is None:
            target = DEFAULT_RECALL if recall is None else recall
            check_creation(dimension, target)
            is_new = self._make(name, fingerprint, dimension, target)
            pinned = self._find(name)
        if pinned is None:  # another server deletes at the same time
            raise NotFound(f"the collection {name} was deleted meanwhile", remedy="create it again")
        check_same(
            name,
            (pinned.fingerprint, pinned.dimension, pinned.recall),
            (fingerprint, dimension, recall),
        )
        return self._open(pinned), is_new

    def delete(self, name: str) -> None:
        if not self._remove(check_name(name)):
            raise NotFound("no such collection")
        with self._changing:
            _, collection = self._opened.pop(name, (None, None))
        if collection is not None:
            collection.close(finish=False)

    def _open(self, pinned: P) -> C:
        present = self._find_open(pinned)
        if present is not None:
            return present
        opened = self._opener(pinned)  # it may wait for the store, and others not for it
        with self._changing:
            present = self._find_open(pinned)
            if present is None:
                self._opened[pinned.name] = pinned.identity, opened
            return opened if present is None else present

    def _find_open(self, pinned: P) -> C | None:
        identity, collection = self._opened.get(pinned.name, (None, None))
        return collection if identity == pinned.identity else None

    @abstractmethod
    def _identities(self) -> Mapping[str, int | str]:
        """Returns the identity of each collection that is there."""

    @abstractmethod
    def _find(self, name: str) -> P | None:
        """Returns what is kept of the collection of this name; None where there is none."""

    @abstractmethod
    def _make(self, name: str, fingerprint: Fingerprint, dimension: int, recall: float) -> bool:
        """Makes the collection; returns False where another server did at the same time."""

    @abstractmethod
    def _remove(self, name: str) -> bool:
        """Deletes the collection; returns False where there is none."""

    @abstractmethod
    def _opener(self, pinned: P) -> C: ...

    @abstractmethod
    def _disconnect(self) -> None: ...
