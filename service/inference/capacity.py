"""Something that requests hold for a while: memory for bodies, pixels to decode."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from mlcd.errors import Overloaded
from service.telemetry.metrics import Metrics


class Capacity:
    """A bounded number of units, of which owners leave each other a share. Use from one event loop."""

    def __init__(self, of: str, most: int, *, always: int, metrics: Metrics) -> None:
        """of: what the units are. always: so many one owner may hold, however little is free."""
        self._of, self._most, self._always = of, most, always
        self._metrics = metrics
        self._held = 0
        self._held_by: Counter[object] = Counter()

    def check(self, num: int, *, owner: object | None) -> None:
        """Raises Overloaded where so many cannot be reserved now. None is an owner without a share."""
        free = self._most - self._held - num
        # However many owners are greedy, each leaves as much free as it holds itself: one alone can
        # take half of the whole, two a third each, and there is always something for a newcomer.
        if free < 0 or (owner is not None and self._held_by[owner] + num > max(free, self._always)):
            whose = "the server" if free < 0 else "this client"
            self._metrics.rejected("overloaded")
            raise Overloaded(f"{whose} holds as many {self._of} as it may", remedy="try again in a moment")

    def reserve(self, num: int, *, owner: object | None) -> None:
        """Reserves so many until `release`. Raises as `check`."""
        self.check(num, owner=owner)
        self._change(num, owner)

    def release(self, num: int, *, owner: object | None) -> None:
        self._change(-num, owner)

    @contextmanager
    def reserved(self, num: int, *, owner: object | None) -> Iterator[None]:
        """Reserves so many for a while. Raises as `check`."""
        self.reserve(num, owner=owner)
        try:
            yield
        finally:
            self.release(num, owner=owner)

    def _change(self, num: int, owner: object | None) -> None:
        self._held += num
        self._metrics.held(self._of, self._held)
        if owner is not None:
            self._held_by[owner] += num
            if not self._held_by[owner]:
                del self._held_by[owner]
