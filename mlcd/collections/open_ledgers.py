"""The ledgers of a store's collections that are open: those that were used last."""

import threading
from itertools import islice
from typing import Final, Protocol

MOST_OPEN: Final = 64  # opening one again takes a millisecond or two


class Resting(Protocol):
    """An object that uses descriptors and can do without them between its uses."""

    def rest(self) -> bool:
        """Closes the descriptors until the next use; returns False where the object is in use."""
        ...


class OpenLedgers:
    """The `MOST_OPEN` ledgers used last, and those in use. Every method may be called from many
    threads.
    """

    def __init__(self) -> None:
        self._order: dict[Resting, None] = {}  # in order of use, the latest last
        self._changing = threading.Lock()

    def record_use(self, ledger: Resting) -> None:
        """Records a use, and closes the descriptors of the least recently used where there are too
        many.
        """
        with self._changing:
            self._order.pop(ledger, None)
            self._order[ledger] = None
            idle = list(islice(self._order, max(0, len(self._order) - MOST_OPEN)))
            for ledger_to_rest in idle:
                del self._order[ledger_to_rest]
        for ledger_to_rest in idle:
            if not ledger_to_rest.rest():
                with self._changing:
                    self._order.setdefault(ledger_to_rest)

    def forget(self, ledger: Resting) -> None:
        """Forgets a ledger that is closed for good."""
        with self._changing:
            self._order.pop(ledger, None)
