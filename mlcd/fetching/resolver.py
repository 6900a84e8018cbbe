"""The resolver of names, in threads: the system's resolver blocks."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from mlcd.fetching.domain_places import DomainPlaces

# Resolves a host and a port to addresses, as text. Raises OSError or UnicodeError without any.
LookUp: TypeAlias = Callable[[str, int], list[str]]


def system_addresses(host: str, port: int) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Resolver:
    """Threads that domains share: a slow name server keeps only a part of them busy.

    A look-up cannot be canceled: the request may have ended long before its thread is free again.
    """

    def __init__(self, look_up: LookUp, *, num_threads: int) -> None:
        self._look_up, self._places = look_up, DomainPlaces(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="resolve")

    async def addresses(self, host: str, port: int) -> list[str]:
        """Resolves a host. Raises what `LookUp` raises."""
        await self._places.take(host)
        looking = asyncio.get_running_loop().run_in_executor(
            self._threads, self._look_up, host, port
        )
        looking.add_done_callback(lambda _: self._places.leave(host))
        return await asyncio.shield(looking)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
