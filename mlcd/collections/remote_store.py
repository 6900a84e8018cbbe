"""The part of a remote store that is the same for all stores: its collections, by name."""

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
    """The fixed properties of one collection, as its store records them.

    identity: differs from that of every earlier or later collection of the same name.
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
    """The collections of a remote store. All methods are thread-safe; `Collections` documents them.

    Other servers may create and delete collections at any time: the store is queried when one of
    them is requested by name.
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
        """Opens collections that other servers created, and drops those that they deleted."""
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
            is_new = self._create(name, fingerprint, dimension, target)
            pinned = self._find(name)
        if pinned is None:  # another server deleted it at the same time
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
        existing = self._find_open(pinned)
        if existing is not None:
            return existing
        opened = self._open_pinned(pinned)  # outside the lock: it may block on the network
        with self._changing:
            existing = self._find_open(pinned)
            if existing is None:
                self._opened[pinned.name] = pinned.identity, opened
            return opened if existing is None else existing

    def _find_open(self, pinned: P) -> C | None:
        identity, collection = self._opened.get(pinned.name, (None, None))
        return collection if identity == pinned.identity else None

    @abstractmethod
    def _identities(self) -> Mapping[str, int | str]:
        """Returns the identity of each collection of the store, by name."""

    @abstractmethod
    def _find(self, name: str) -> P | None:
        """Returns the properties of the collection of this name; None if there is none."""

    @abstractmethod
    def _create(self, name: str, fingerprint: Fingerprint, dimension: int, recall: float) -> bool:
        """Creates the collection; returns False if another server did so at the same time."""

    @abstractmethod
    def _remove(self, name: str) -> bool:
        """Deletes the collection; returns False if there is none."""

    @abstractmethod
    def _open_pinned(self, pinned: P) -> C: ...

    @abstractmethod
    def _disconnect(self) -> None: ...
