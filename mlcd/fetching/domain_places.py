"""Places that domains share: who owns a domain may have any number of names below it."""

import asyncio
from collections import Counter, deque
from ipaddress import ip_address
from typing import TypeAlias

_Waiting: TypeAlias = tuple[str, "asyncio.Future[None]"]


class DomainPlaces:
    """A number of places, of which no domain holds more than it leaves free.

    One domain can take half of them, the next one half of the rest: a few whose servers never
    answer leave a place to the others. Use it from one event loop.
    """

    def __init__(self, num: int, *, least: int = 0) -> None:
        """least: places that a domain may hold even if it leaves fewer free."""
        self._free, self._least = num, least
        self._held: Counter[str] = Counter()
        self._waiting: deque[_Waiting] = deque()

    async def take(self, host: str) -> None:
        """Waits for a place for the domain of this host; `leave` gives it back."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((_domain(host), turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place came in the same moment
                self.leave(host)
            raise

    def leave(self, host: str) -> None:
        """Gives a place of the domain back."""
        domain = _domain(host)
        self._free += 1
        self._held[domain] -= 1
        if not self._held[domain]:
            del self._held[domain]
        self._admit()

    def _admit(self) -> None:
        """Gives places to those who wait, in the order in which they came."""
        staying: deque[_Waiting] = deque()
        while self._waiting and self._free:
            domain, turn = self._waiting.popleft()
            if turn.done():  # canceled
                continue
            if self._held.get(domain, 0) < max(self._free, self._least):
                self._free -= 1
                self._held[domain] += 1
                turn.set_result(None)
            else:
                staying.append((domain, turn))
        self._waiting.extendleft(reversed(staying))


def _domain(host: str) -> str:
    """Returns the last two labels, whose owner has the name servers of all names below; an address
    is a domain of its own.
    """
    try:
        return str(ip_address(host))
    except ValueError:
        return ".".join(host.rstrip(".").split(".")[-2:])
