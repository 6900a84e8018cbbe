"""Resolves host names in threads, because the system's resolver blocks."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from mlcd.fetching.domain_places import DomainPlaces

# Resolves a host and a port to addresses as text. Raises OSError or UnicodeError if there is none.
LookUp: TypeAlias = Callable[[str, int], list[str]]


def system_addresses(host: str, port: int) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Resolver:
    """A thread pool shared by domains: a slow name server occupies only some of the threads.

    A look-up cannot be canceled: its thread may stay busy long after the request has ended.
    """

    def __init__(self, look_up: LookUp, *, num_threads: int) -> None:
        self._look_up, self._places = look_up, DomainPlaces(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="resolve")

    async def addresses(self, host: str, port: int) -> list[str]:
        """Resolves a host. Raises OSError or UnicodeError if it lacks an address."""
        await self._places.take(host)
        pending = asyncio.get_running_loop().run_in_executor(
            self._threads, self._look_up, host, port
        )
        pending.add_done_callback(lambda _: self._places.leave(host))
        return await asyncio.shield(pending)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
