"""Names to addresses, in threads: the system's resolver knows no other way to wait."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias
from weakref import WeakValueDictionary

LookUp: TypeAlias = Callable[[str, int], list[str]]
"""A host and a port to addresses, as text. Raises OSError or UnicodeError where there are none."""


def system_addresses(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Resolver:
    """Threads that are divided among domains: one whose name server is slow keeps its own busy, and nobody else's.

    A look-up cannot be canceled: who asked may have gone long before its thread is free again.
    """

    def __init__(self, look_up: LookUp, *, num_threads: int, most_per_domain: int) -> None:
        """most_per_domain: look-ups at one time."""
        self._look_up, self._most = look_up, most_per_domain
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="resolve")
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def addresses(self, host: str, port: int) -> list[str]:
        """Raises as `LookUp` does."""
        places = self._places.setdefault(_domain(host), asyncio.Semaphore(self._most))
        await places.acquire()
        looking = asyncio.get_running_loop().run_in_executor(
            self._threads, self._look_up, host, port
        )
        looking.add_done_callback(lambda _: places.release())
        return await asyncio.shield(looking)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _domain(host: str) -> str:
    """Its last two labels: who owns them owns the name servers of all that is below."""
    return ".".join(host.split(".")[-2:])
