"""The usage of each API key: counted in memory, and added to a store every few seconds."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Final

from mlcd.errors import Unavailable
from mlcd.service.keys.file import Key
from mlcd.service.keys.usage_stores import MemoryUsage, SqliteUsage, Usage, UsageStore, today
from mlcd.service.timings import USAGE_CLOSE_S, USAGE_FLUSH_S

_FILE: Final = "usage.sqlite"
_log = logging.getLogger("mlcd.service")


class UsageLedger:
    """The usage of all keys. Use from one event loop.

    No request waits for the store. While it is away, counts stay in memory.
    """

    def __init__(self, store: UsageStore, *, today: Callable[[], date] = today) -> None:
        self.store, self._today = store, today
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="usage")
        self._lock = Lock()  # of the counts that no batch has yet
        self._counted: Usage = {}
        # It keeps its id until the store has answered.
        self._batch: tuple[str, Usage] | None = None  # of the thread alone
        self._is_away = False

    def count(self, key: Key | None, counts: Mapping[str, int]) -> None:
        """Adds to what a key, or a client without one, has used today."""
        place = self._today().isoformat(), "" if key is None else key.id
        with self._lock:
            self._counted.setdefault(place, Counter()).update(counts)

    async def read(self, first: date, last: date) -> Usage:
        """Returns the usage of the days from `first` to `last`, with all that was counted here.

        Raises Unavailable while the store is away.
        """

        def read() -> Usage:
            self._flush()
            return self.store.read(first, last)

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def flush(self) -> None:
        """Adds to the store what was counted; leaves it in memory while the store is away."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._flush)
        except Unavailable as error:
            if not self._is_away:
                _log.warning("%s: the usage of keys is counted in memory", error)
            self._is_away = True
        else:
            self._is_away = False

    async def run(self) -> None:
        """Flushes every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(USAGE_FLUSH_S)
            await self.flush()

    async def close(self) -> None:
        """Flushes a last time, without waiting long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(USAGE_CLOSE_S):
                await self.flush()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _flush(self) -> None:
        while batch := self._batch or self._take():
            self._batch = batch
            self.store.add(*batch)
            self._batch = None

    def _take(self) -> tuple[str, Usage] | None:
        with self._lock:
            counted, self._counted = self._counted, {}
        return (uuid.uuid4().hex, counted) if counted else None


@asynccontextmanager
async def open_usage(
    redis_url: str | None, state: Path | None, *, keep_days: int
) -> AsyncIterator[UsageLedger]:
    """Opens the usage in Redis, else in the state directory, else in memory."""
    ledger = UsageLedger(_open_store(redis_url, state, keep_days))
    running = asyncio.create_task(ledger.run(), name="usage")
    try:
        yield ledger
    finally:
        running.cancel()
        await ledger.close()


def _open_store(redis_url: str | None, state: Path | None, keep_days: int) -> UsageStore:
    if redis_url is not None:
        from mlcd.service.keys.redis_usage import RedisUsage

        return RedisUsage(redis_url, keep_days)
    return MemoryUsage(keep_days) if state is None else SqliteUsage(state / _FILE, keep_days)
