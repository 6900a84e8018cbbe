"""The background thread that makes the index of a collection again when it is due.

That is where much was added or deleted since the last index, or where the one on the disk was
damaged. Searches are right without an index; after a failure it is tried again when the collection
has grown.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from mlcd.collections.searcher import Searcher
from mlcd.errors import Conflict, MlcdError

# rows beside the index below which no new generation is made; a scan of them takes about as long as
# a search in an index
_UNINDEXED_ROWS: Final = 10_000
_UNINDEXED_SHARE: Final = 0.2
_log = logging.getLogger("mlcd.collections")


class Upkeep:
    """The upkeep of one collection's index.

    damaged: true until a damaged index is made again. error: why the last try failed, None where it
    did not.
    """

    def __init__(self, name: str, *, damaged: bool) -> None:
        self.damaged = damaged
        self.error: str | None = None
        self._name = name
        self._thread: threading.Thread | None = None
        self._above = 0  # positions below which a failed index is not tried again
        self._abandoned = False

    def may_try(self, num_positions: int) -> bool:
        """Tells whether enough has been added since the last failure."""
        return num_positions >= self._above

    def is_due(self, searcher: Searcher) -> bool:
        if not self.may_try(searcher.num_positions):
            return False
        dead = searcher.num_positions - searcher.num_alive
        due = max(_UNINDEXED_ROWS, int(_UNINDEXED_SHARE * searcher.num_indexed))
        return self.damaged or max(len(searcher.delta), dead) > due

    def begin(self, reindex: Callable[[], None], num_positions: Callable[[], int]) -> None:
        """Runs `reindex` in a thread, unless one is at it. For one thread at a time.

        num_positions: returns those of the collection at the time of a failure.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(
            target=self._run, args=(reindex, num_positions), name="collection-index", daemon=True
        )
        self._thread.start()

    def record_success(self) -> None:
        """Notes that the index was made, by this thread or another."""
        self.damaged, self.error = False, None

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Gives up the index that is being made, at the next `check_wanted`."""
        self._abandoned = True

    def check_wanted(self) -> None:
        """Raises Conflict where the index was given up."""
        if self._abandoned:
            raise Conflict(f"{self._name} was closed meanwhile", remedy="open it again")

    def _run(self, reindex: Callable[[], None], num_positions: Callable[[], int]) -> None:
        try:
            reindex()
            self._above = 0
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread; `describe` tells
            self.error = str(error) if isinstance(error, MlcdError) else type(error).__name__
            if not self._abandoned:
                _log.warning("the index of %s could not be made: %s", self._name, self.error)
            self._above = num_positions() + _UNINDEXED_ROWS
