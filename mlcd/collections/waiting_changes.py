"""Group commit for one collection in one process: one thread writes the changes of all threads."""

import threading
from collections import deque
from collections.abc import Callable

from mlcd.collections.changes import Change, Outcome, WriteRequest


def count_one(_: Change) -> int:
    """Returns 1, so that the size of a batch is its number of changes."""
    return 1


class WaitingChanges:
    """The changes that are not written yet. All methods are thread-safe.

    waiting: changes that no thread has taken yet. lock: held by the thread that writes.
    """

    def __init__(
        self,
        write: Callable[[list[Change]], None],
        *,
        batch_size: int,
        size: Callable[[Change], int] = count_one,
    ) -> None:
        """write: writes changes and sets their outcomes or errors; an error that it raises fails
        all of them. batch_size: total size at which a batch is full.
        """
        self.waiting: deque[Change] = deque()
        self.lock = threading.Lock()
        self._write, self._batch_size, self._size = write, batch_size, size

    def submit(self, request: WriteRequest) -> list[Outcome]:
        """Returns the request's outcomes once it is written."""
        change = Change(request)
        self.waiting.append(change)
        with self.lock:
            while not change.settled:
                self._write_for_all()
        if change.error is not None:
            raise change.error
        return change.outcomes

    def _write_for_all(self) -> None:
        changes: list[Change] = []
        total_size = 0
        while self.waiting and total_size < self._batch_size:
            changes.append(self.waiting.popleft())
            total_size += self._size(changes[-1])
        try:
            self._write(changes)
        except BaseException as error:
            for change in changes:
                change.error = error
            raise
        finally:
            for change in changes:
                change.settled = True
