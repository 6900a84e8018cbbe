"""The file descriptors that many collections share, because one set for each would exceed the
limit.
"""

import resource
import threading
from itertools import islice
from pathlib import Path
from typing import Final, Protocol, Self

from mlcd.collections.locks import Lock, StoreLocks
from mlcd.too_many_files import limited_open_files

_PER_LEDGER: Final = 3  # descriptors of an open ledger
_SHARE: Final = 20  # times as many descriptors are left for connections and all else
_OPEN: Final = Path("/dev/fd")
_MOST_LEDGERS: Final = 64  # opening one again takes a millisecond or two


class Resting(Protocol):
    """An object that uses descriptors and can do without them between its uses."""

    def rest(self) -> bool:
        """Closes the descriptors until the next use; returns False where the object is in use."""
        ...


class Descriptors:
    """The one descriptor for all locks of a store's collections, and those of the ledgers used
    last.

    `lock` is for one thread at a time; `used` and `forget` may be called from many.
    """

    def __init__(self, locks: StoreLocks, *, most: int) -> None:
        """most: the number of ledgers that stay open; those in use come on top."""
        self._locks, self._most = locks, most
        self._order: dict[Resting, None] = {}  # in order of use, the latest last
        self._changing = threading.Lock()

    @classmethod
    def open(cls, folder: Path, *, writable: bool) -> Self:
        """Opens those of the store in `folder`, as many as the process's limit on open files
        leaves free.
        """
        most = _MOST_LEDGERS
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            free = soft - _num_open()
            most = min(max(1, free // (_SHARE * _PER_LEDGER)), _MOST_LEDGERS)
        return cls(StoreLocks(folder, writable=writable), most=most)

    def lock(self, path: Path, *, writable: bool) -> Lock:
        """Locks a collection; see `StoreLocks.lock`."""
        return self._locks.lock(path, writable=writable)

    def used(self, one: Resting) -> None:
        """Records a use, and closes the descriptors of the least recently used where there are too
        many.
        """
        with self._changing:
            self._order.pop(one, None)
            self._order[one] = None
            idle = list(islice(self._order, max(0, len(self._order) - self._most)))
            for other in idle:
                del self._order[other]
        for other in idle:
            if not other.rest():
                with self._changing:
                    self._order.setdefault(other)

    def forget(self, one: Resting) -> None:
        """Forgets an object that is closed for good."""
        with self._changing:
            self._order.pop(one, None)

    def close(self) -> None:
        self._locks.close()


def _num_open() -> int:
    """Returns how many descriptors the process has open; 0 where the system does not tell."""
    with limited_open_files():
        try:
            return len([*_OPEN.iterdir()])
        except FileNotFoundError:  # /proc is not mounted
            return 0
