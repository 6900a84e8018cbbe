"""The resolver of names, in threads: the system's resolver blocks."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias
from weakref import WeakValueDictionary

# Resolves a host and a port to addresses, as text. Raises OSError or UnicodeError without any.
LookUp: TypeAlias = Callable[[str, int], list[str]]


def system_addresses(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Resolver:
    """Threads that are divided among domains: a slow name server keeps only its share busy.

    A look-up cannot be canceled: the request may have ended long before its thread is free again.
    """

    def __init__(self, look_up: LookUp, *, num_threads: int, most_per_domain: int) -> None:
        """Starts the threads. most_per_domain: look-ups of one domain at a time."""
        self._look_up, self._most = look_up, most_per_domain
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="resolve")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def addresses(self, host: str, port: int) -> list[str]:
        """Resolves a host. Raises what `LookUp` raises."""
        turn = self._turns.setdefault(_domain(host), asyncio.Semaphore(self._most))
        await turn.acquire()
        looking = asyncio.get_running_loop().run_in_executor(
            self._threads, self._look_up, host, port
        )
        looking.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(looking)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _domain(host: str) -> str:
    """Returns the last two labels: their owner has the name servers of all names below."""
    return ".".join(host.split(".")[-2:])
