"""The decoding threads, which owners share fairly by pixels."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, TypeVar

from service.inference.fair import CostQueue

_Result = TypeVar("_Result")
_LEAST: Final = 2**16  # pixels; the cost of an image apart from its own pixels


class DecodingThreads:
    """A fair queue of images in front of decoding threads.

    The owner with the fewest decoded pixels comes next, after at most one image of each thread. A
    thread chooses the next image when it is free, not when the image is submitted.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._waiting: CostQueue[tuple[Future[Any], Callable[[], Any]]] = CostQueue()

    async def run(self, owner: object, pixels: int, decode: Callable[[], _Result]) -> _Result:
        """Returns what `decode` returns on a thread.

        owner: the client that sent the image. pixels: its cost.
        """
        future: Future[_Result] = Future()
        with self._lock:
            self._waiting.put(owner, _LEAST + pixels, (future, decode))
        self._threads.submit(self._next)
        return await asyncio.wrap_future(future)

    def _next(self) -> None:
        with self._lock:
            future, decode = self._waiting.take()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(decode())
        except BaseException as error:  # noqa: BLE001 - the waiter of the future raises it
            future.set_exception(error)
        finally:
            del future, decode  # else the error's frames keep the error and the image in memory
