"""The decoding threads, which owners share fairly by pixels."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from mlcd.service.inference.fair import CostQueue

_Result = TypeVar("_Result")
_LEAST: Final = 2**16  # pixels; the cost of an image apart from its own pixels


class DecodingThreads:
    """A fair queue of images in front of decoding threads.

    The owner with the fewest decoded pixels comes next, after at most one image of each thread. A
    thread chooses the next image when it is free, not when the image is submitted.
    """

    def __init__(self, threads: Executor, *, least: int = _LEAST) -> None:
        """least: the cost of an item apart from its size."""
        self._threads, self._least = threads, least
        self._lock = threading.Lock()
        self._waiting: CostQueue[_Waiting] = CostQueue()

    async def run(self, owner: object, pixels: int, decode: Callable[[], _Result]) -> _Result:
        """Returns what `decode` returns on a thread.

        owner: the client that sent the image. pixels: its cost.
        """
        waiting = _Waiting(Future(), decode)
        waiting.future.add_done_callback(waiting.forget)
        with self._lock:
            self._waiting.put(owner, self._least + pixels, waiting)
        self._threads.submit(self._next)
        result: _Result = await asyncio.wrap_future(waiting.future)
        return result

    def _next(self) -> None:
        with self._lock:
            waiting = self._waiting.take()
        future, decode = waiting.future, waiting.decode
        if decode is None or not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(decode())
        except BaseException as error:  # noqa: BLE001 - the waiter of the future raises it
            future.set_exception(error)
        finally:
            # else the error's frames keep the error and the image in memory
            del waiting, future, decode


@dataclass
class _Waiting:
    """An image in the queue. decode: None once it is done, or its client has left: it holds the
    image, for which nobody answers any more.
    """

    future: Future[Any]
    decode: Callable[[], Any] | None

    def forget(self, _: Future[Any]) -> None:
        self.decode = None
