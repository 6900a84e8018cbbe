"""The items of a collection behind a URL in memory, for the map, the clusters, near-duplicates and
whatever else only a state of all items can answer.

Only what has changed since is read again. Other searches do not need it.
"""

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mlcd.collections.changes import Effect
from mlcd.collections.generation import nothing
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

    mark: tells the state after them from all others, once they were read to the end.
    """

    effects: Iterable[Effect]
    mark: Any


class ChangingItems(Protocol):
    """The items of one collection, as a store keeps them."""

    def changes(self, earlier: Searcher, mark: Any) -> AbstractContextManager[Difference | None]:
        """Opens what has changed since `earlier` was read, which `mark` stands for (None: nothing
        was read); None where nothing has. Raises what `check_fits` raises.
        """
        ...


class MemoryState:
    """The state of one collection as this process read it last."""

    def __init__(self, items: ChangingItems, dimension: int) -> None:
        self._items, self._dimension = items, dimension
        self._reading = threading.Lock()
        self._growth = Growth(nothing(dimension), dimension)
        self._mark: Any = None
        self._searcher: Searcher = self._growth.searcher()

    def now(self) -> Searcher:
        """Returns the present state. Raises Conflict where there are too many items for memory."""
        with self._reading, self._items.changes(self._searcher, self._mark) as difference:
            if difference is not None:
                try:
                    self._growth.apply(difference.effects)
                except BaseException:  # half of them: all is read again
                    self._forget()
                    raise
                self._mark, self._searcher = difference.mark, self._growth.searcher()
            return self._searcher

    def _forget(self) -> None:
        self._growth = Growth(nothing(self._dimension), self._dimension)
        self._mark, self._searcher = None, self._growth.searcher()


def check_fits(num_items: int, store: str) -> None:
    """Raises Conflict where there are too many items for memory."""
    if num_items > MOST_ITEMS:
        raise Conflict(
            f"a collection of more than {MOST_ITEMS:,} items in {store} cannot be read into"
            " memory: no map, no clusters, no near-duplicates, no exact search",
            remedy="copy it into a folder with `mlcd index`",
        )
