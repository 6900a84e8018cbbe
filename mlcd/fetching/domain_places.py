"""Slots shared by domains: the owner of a domain can create any number of host names below it."""

import asyncio
from collections import Counter, deque
from ipaddress import ip_address
from typing import TypeAlias

_Waiting: TypeAlias = tuple[str, "asyncio.Future[None]"]


class DomainPlaces:
    """A limited number of slots; no domain takes more slots than it leaves free.

    One domain can take half of the slots, the next domain half of the remaining slots: a few
    domains whose servers never respond cannot block the others. Use it from one event loop.
    """

    def __init__(self, num: int, *, least: int = 0) -> None:
        """num: slots in total. least: slots that a domain may take even if it leaves fewer free."""
        self._free, self._least = num, least
        self._held: Counter[str] = Counter()
        self._waiting: deque[_Waiting] = deque()

    async def take(self, host: str) -> None:
        """Waits for a slot for the domain of this host; `leave` releases it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((_domain(host), turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot was granted at the same moment
                self.leave(host)
            raise

    def leave(self, host: str) -> None:
        """Releases a slot of the host's domain."""
        domain = _domain(host)
        self._free += 1
        self._held[domain] -= 1
        if not self._held[domain]:
            del self._held[domain]
        self._admit()

    def _admit(self) -> None:
        """Grants free slots to waiting hosts, in order of arrival."""
        still_waiting: deque[_Waiting] = deque()
        while self._waiting and self._free:
            domain, turn = self._waiting.popleft()
            if turn.done():  # canceled
                continue
            if self._held.get(domain, 0) < max(self._free, self._least):
                self._free -= 1
                self._held[domain] += 1
                turn.set_result(None)
            else:
                still_waiting.append((domain, turn))
        self._waiting.extendleft(reversed(still_waiting))


def _domain(host: str) -> str:
    """Returns the last two labels: their owner runs the name servers of all names below. An IP
    address is its own domain.
    """
    try:
        return str(ip_address(host))
    except ValueError:
        return ".".join(host.rstrip(".").split(".")[-2:])
