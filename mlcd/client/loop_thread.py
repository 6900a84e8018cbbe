"""An event loop in its own thread, for synchronous callers."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from mlcd.errors import ConfigInvalid

_Result = TypeVar("_Result")
_Cleanup = Callable[[], Coroutine[Any, Any, None]]
_Running = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class LoopThread:
    """A thread with an event loop, started at its first use. Threads may share it, processes
    cannot.
    """

    def __init__(self, cleanup: _Cleanup) -> None:
        """cleanup: runs at the end, after all other work was cancelled."""
        self._cleanup = cleanup
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._request_end: Callable[[], object] = lambda: None
        self._process = os.getpid()
        self._closed = False

    def start(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Starts `work` in the loop. Cancelling the future cancels the work."""
        try:
            loop = self._open_loop()
        except (ConfigInvalid, RuntimeError):
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, loop)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs `work` in the loop and waits for the result; an interrupt cancels the work."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the cleanup of work in the loop; does nothing if the loop has ended.

        Waits for it, except in the loop's own thread, where waiting would deadlock.
        """
        try:
            future = self.start(work)
        except RuntimeError:
            return
        if threading.current_thread() is not self._thread:
            future.result()

    def close(self) -> None:
        """Cancels all work and ends the thread if it was started."""
        with self._lock:
            self._closed = True
            if self._thread is not None and self._process == os.getpid():
                self._request_end()
                self._thread.join()
            self._loop = self._thread = None

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._process != os.getpid():
            raise ConfigInvalid(
                "this client belongs to another process", remedy="create one client per process"
            )
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._loop is None:
                started: Future[_Running] = Future()
                self._thread = threading.Thread(
                    target=_run_loop, args=(started, self._cleanup), name="mlcd-client", daemon=True
                )
                self._thread.start()
                self._loop, end_requested = started.result()
                # This also runs if the owner forgets to close. It only signals the thread,
                # because a finalizer must not wait.
                self._request_end = weakref.finalize(
                    self, self._loop.call_soon_threadsafe, end_requested.set
                )
            return self._loop


def _run_loop(started: Future[_Running], cleanup: _Cleanup) -> None:
    asyncio.run(_wait_until_ended(started, cleanup))


async def _wait_until_ended(started: Future[_Running], cleanup: _Cleanup) -> None:
    end_requested = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), end_requested))
    await end_requested.wait()
    pending = asyncio.all_tasks() - {asyncio.current_task()}
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    await cleanup()
