"""The background thread that rebuilds the index of a collection when due: after many items were
added or deleted, or if the index on the disk was damaged.

Searches are correct without an index. After a failure, the build is retried once the collection has
grown.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from mlcd.collections.searcher import Searcher
from mlcd.errors import Conflict, MlcdError

# Fewest unindexed rows for a rebuild; scanning them takes about as long as searching an index.
_UNINDEXED_ROWS: Final = 10_000
_UNINDEXED_SHARE: Final = 0.2
_log = logging.getLogger("mlcd.collections")


class Upkeep:
    """The upkeep of one collection's index.

    damaged: True until a damaged index is rebuilt. error: message of the last failure, None after a
    success.
    """

    def __init__(self, name: str, *, damaged: bool) -> None:
        self.damaged = damaged
        self.error: str | None = None
        self._name = name
        self._thread: threading.Thread | None = None
        self._retry_at = 0  # number of positions from which a failed build is retried
        self._abandoned = False

    def may_try(self, num_positions: int) -> bool:
        """Returns whether enough items were added since the last failure."""
        return num_positions >= self._retry_at

    def is_due(self, searcher: Searcher) -> bool:
        if not self.may_try(searcher.num_positions):
            return False
        num_dead = searcher.num_positions - searcher.num_alive
        threshold = max(_UNINDEXED_ROWS, int(_UNINDEXED_SHARE * searcher.num_indexed))
        return self.damaged or max(len(searcher.delta), num_dead) > threshold

    def start(self, reindex: Callable[[], None], num_positions: Callable[[], int]) -> None:
        """Runs `reindex` in a thread, unless one is running. Not thread-safe.

        num_positions: returns the current number of positions; called after a failure.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(
            target=self._run, args=(reindex, num_positions), name="collection-index", daemon=True
        )
        self._thread.start()

    def record_success(self) -> None:
        """Records that this or another thread has built the index."""
        self.damaged, self.error = False, None

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Cancels the running build, at its next `check_wanted`."""
        self._abandoned = True

    def check_wanted(self) -> None:
        """Raises Conflict if the build was canceled."""
        if self._abandoned:
            raise Conflict(f"{self._name} was closed meanwhile", remedy="open it again")

    def _run(self, reindex: Callable[[], None], num_positions: Callable[[], int]) -> None:
        try:
            reindex()
            self._retry_at = 0
        except Exception as error:  # noqa: BLE001 - nobody joins this thread; `describe` reports it
            self.error = str(error) if isinstance(error, MlcdError) else type(error).__name__
            if not self._abandoned:
                _log.warning("the index of %s could not be built: %s", self._name, self.error)
            self._retry_at = num_positions() + _UNINDEXED_ROWS
