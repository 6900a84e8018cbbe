"""A copy of a remote collection in memory, for requests that need all items: the map, the clusters
and near-duplicates, and searches that the store cannot answer.

Each use reads only the changes since the last one.
"""

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mlcd.collections.changes import Effect
from mlcd.collections.generation import empty_generation
from mlcd.collections.growth import Growth
from mlcd.collections.searcher import Searcher
from mlcd.errors import Conflict

MOST_ITEMS: Final = 1_000_000
IN_MEMORY: Final = (
    f"the map, clusters and near-duplicates are made in a server's memory, up to {MOST_ITEMS:,}"
)


@dataclass(frozen=True)
class Difference:
    """The changes of the items since a state was read, in an order in which they can be applied.

    mark: identifies the state after the changes; valid once `effects` is exhausted.
    """

    effects: Iterable[Effect]
    mark: Any


class ChangingItems(Protocol):
    """The items of one collection in a store."""

    def changes(self, earlier: Searcher, mark: Any) -> AbstractContextManager[Difference | None]:
        """Yields the changes since the state `earlier`; None if there are none.

        mark: identifies `earlier`; None if nothing was read before. Raises the errors of
        `check_fits`.
        """
        ...


class MemoryState:
    """The state of one collection that this process read last. Thread-safe."""

    def __init__(self, items: ChangingItems, dimension: int) -> None:
        self._items, self._dimension = items, dimension
        self._reading = threading.Lock()
        self._growth = Growth(empty_generation(dimension), dimension)
        self._mark: Any = None
        self._searcher: Searcher = self._growth.searcher()

    def now(self) -> Searcher:
        """Returns the current state. Raises Conflict if there are too many items for memory."""
        with self._reading, self._items.changes(self._searcher, self._mark) as difference:
            if difference is not None:
                try:
                    self._growth.apply(difference.effects)
                except BaseException:  # Some effects may be applied: read everything again.
                    self._reset()
                    raise
                self._mark, self._searcher = difference.mark, self._growth.searcher()
            return self._searcher

    def _reset(self) -> None:
        self._growth = Growth(empty_generation(self._dimension), self._dimension)
        self._mark, self._searcher = None, self._growth.searcher()


def check_fits(num_items: int, store: str) -> None:
    """Raises Conflict if there are more than `MOST_ITEMS` items."""
    if num_items > MOST_ITEMS:
        raise Conflict(
            f"a collection of more than {MOST_ITEMS:,} items in {store} cannot be read into"
            " memory: no map, no clusters, no near-duplicates, no exact search",
            remedy="copy it into a folder with `mlcd index`",
        )
