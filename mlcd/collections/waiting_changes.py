"""The writers of one collection in one process: the first of them writes for all that wait."""

import threading
from collections import deque
from collections.abc import Callable

from mlcd.collections.changes import Change, Outcome, WriteRequest


def one_each(_: Change) -> int:
    """Counts the changes."""
    return 1


class WaitingChanges:
    """The changes that are not written yet. Every method may be called from many threads.

    waiting: those that nobody has taken. lock: held by the one who writes.
    """

    def __init__(
        self,
        write: Callable[[list[Change]], None],
        *,
        most: int,
        size: Callable[[Change], int] = one_each,
    ) -> None:
        """write: writes changes, and sets their outcomes or errors; what it raises is the error of
        all. most: changes are taken together until their sizes add up to it.
        """
        self.waiting: deque[Change] = deque()
        self.lock = threading.Lock()
        self._write, self._most, self._size = write, most, size

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
        while self.waiting and total_size < self._most:
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
