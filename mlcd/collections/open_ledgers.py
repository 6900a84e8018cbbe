"""Bounds the number of open ledgers of a store: the least recently used are closed."""

import threading
from itertools import islice
from typing import Final, Protocol

MOST_OPEN: Final = 64  # opening a ledger again takes a millisecond or two


class IdleClosable(Protocol):
    """An object that can close its file descriptors between uses."""

    def close_until_used(self) -> bool:
        """Closes the descriptors until the next use; returns False if the object is in use."""
        ...


class OpenLedgers:
    """The `MOST_OPEN` ledgers used last, and ledgers in use. All methods are thread-safe."""

    def __init__(self) -> None:
        self._order: dict[IdleClosable, None] = {}  # most recently used last
        self._changing = threading.Lock()

    def record_use(self, ledger: IdleClosable) -> None:
        """Records a use, and closes the descriptors of the least recently used ledgers beyond
        `MOST_OPEN`.
        """
        with self._changing:
            self._order.pop(ledger, None)
            self._order[ledger] = None
            idle = list(islice(self._order, max(0, len(self._order) - MOST_OPEN)))
            for idle_ledger in idle:
                del self._order[idle_ledger]
        for idle_ledger in idle:
            if not idle_ledger.close_until_used():
                with self._changing:
                    self._order.setdefault(idle_ledger)

    def forget(self, ledger: IdleClosable) -> None:
        """Removes a ledger that will not be used again."""
        with self._changing:
            self._order.pop(ledger, None)
