"""Shares decoding threads fairly among owners, by pixels."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from mlcd.service.inference.fair import CostQueue

_Result = TypeVar("_Result")
_ITEM_COST: Final = 2**16  # the fixed cost of an image, in pixels


class DecodingThreads:
    """A fair queue of images for decoding threads.

    The owner with the fewest decoded pixels is next, after at most one image per thread: a thread
    selects its next image when it is free, not when the image is submitted.
    """

    def __init__(self, threads: Executor, *, item_cost: int = _ITEM_COST) -> None:
        """item_cost: fixed cost of an item, in addition to its pixels."""
        self._threads, self._item_cost = threads, item_cost
        self._lock = threading.Lock()
        self._queue: CostQueue[_QueuedImage] = CostQueue()

    async def run(self, owner: object, pixels: int, decode: Callable[[], _Result]) -> _Result:
        """Calls `decode` on a thread and returns its result.

        owner: client that sent the image. pixels: cost of the image.
        """
        queued = _QueuedImage(Future(), decode)
        queued.future.add_done_callback(queued.forget)
        with self._lock:
            self._queue.put(owner, self._item_cost + pixels, queued)
        self._threads.submit(self._decode_next)
        result: _Result = await asyncio.wrap_future(queued.future)
        return result

    def _decode_next(self) -> None:
        with self._lock:
            queued = self._queue.take()
        future, decode = queued.future, queued.decode
        if decode is None or not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(decode())
        except BaseException as error:  # noqa: BLE001 - the waiter of the future raises it
            future.set_exception(error)
        finally:
            # otherwise the error's frames would keep the error and the image in memory
            del queued, future, decode


@dataclass
class _QueuedImage:
    """An image in the queue.

    decode: function that decodes the image; None after decoding or when its client has left, to
    free the image.
    """

    future: Future[Any]
    decode: Callable[[], Any] | None

    def forget(self, _: Future[Any]) -> None:
        self.decode = None
