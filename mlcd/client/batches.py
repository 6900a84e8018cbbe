"""Splits a sequence of inputs into batches by count and bytes, and yields the answers in order with
several requests in flight.
"""

import asyncio
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from mlcd.client.text_batches import Texts
from mlcd.errors import ImageRejected, InvalidInput
from mlcd.types import Embeddings

# per image: its bytes, or the error why it cannot be sent
Images = list[bytes | ImageRejected]
# images, texts, rows [n, D], or the key of an indexed item
Batch = Images | Texts | Embeddings | str


@dataclass(frozen=True)
class Additions:
    """One batch of items for a collection: images or rows [n, D], with n ids and their metadata."""

    ids: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    batch: Images | Embeddings


class IdAssigner:
    """Assigns ids and metadata to consecutive batches."""

    def __init__(self, ids: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None) -> None:
        if isinstance(ids, str) or (metadata is not None and len(metadata) != len(ids)):
            raise InvalidInput("ids and metadata must be lists of the same length")
        self._ids = ids
        self._metadata = [{}] * len(ids) if metadata is None else metadata
        self._num_assigned = 0

    def push(self, batch: Images | Embeddings) -> Additions:
        batch_slice = slice(self._num_assigned, self._num_assigned + len(batch))
        self._num_assigned = batch_slice.stop
        if self._num_assigned > len(self._ids):
            raise self._mismatch("more")
        return Additions(self._ids[batch_slice], self._metadata[batch_slice], batch)

    def end(self) -> None:
        if self._num_assigned != len(self._ids):
            raise self._mismatch(f"{self._num_assigned}")

    def _mismatch(self, num_items: str) -> InvalidInput:
        return InvalidInput(
            f"each item must have one id, got {len(self._ids)} ids for {num_items} items",
            remedy="give one id per item",
        )


_Batch = TypeVar("_Batch")
_Answer = TypeVar("_Answer")

# upper bound of the bytes that a multipart form adds to each file
PART_BYTES: Final = 512
# Largest batch of more than one image, even if the server allows more: requests in flight are held
# in memory. A larger image is sent alone.
_MAX_BATCH_BYTES: Final = 16 * 2**20


def rows_in_batches(rows: Embeddings, *, num: int) -> Iterator[Embeddings]:
    for start in range(0, len(rows), num):
        yield rows[start : start + num]


class ImageBatcher:
    """Collects images into batches of at most `max_images` images and `max_body_bytes` bytes; never
    more than 16 MiB, except for a single larger image.
    """

    def __init__(self, *, max_images: int, max_body_bytes: int) -> None:
        self._max_images = max_images
        self._max_bytes = min(_MAX_BATCH_BYTES, max_body_bytes)
        self._images: Images = []
        self._num_bytes = 0

    def push(self, image: bytes | ImageRejected) -> Images:
        """Adds one image; returns a completed batch, or an empty list."""
        size = len(image) + PART_BYTES if isinstance(image, bytes) else 0
        full = self.take_rest() if self._num_bytes + size > self._max_bytes else []
        self._images.append(image)
        self._num_bytes += size
        return full or (self.take_rest() if len(self._images) >= self._max_images else [])

    def take_rest(self) -> Images:
        """Returns the images that are not yet in a batch."""
        images, self._images, self._num_bytes = self._images, [], 0
        return images


async def answers_async(
    batches: AsyncIterable[_Batch],
    ask: Callable[[_Batch], Coroutine[Any, Any, _Answer]],
    *,
    in_flight: int,
) -> AsyncGenerator[_Answer, None]:
    """Yields the answer to each batch, in order.

    At most `in_flight` requests run at a time; closing the generator early cancels them.
    """
    waiting: deque[asyncio.Task[_Answer]] = deque()
    try:
        async for batch in batches:
            waiting.append(asyncio.create_task(ask(batch)))
            while waiting and (len(waiting) >= in_flight or waiting[0].done()):
                answer = await waiting[0]
                waiting.popleft()
                yield answer
        while waiting:
            answer = await waiting[0]
            waiting.popleft()
            yield answer
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def answers_sync(
    batches: Iterable[_Batch], ask: Callable[[_Batch], Future[_Answer]], *, in_flight: int
) -> Generator[_Answer, None, None]:
    """Yields the answers like `answers_async`, with an `ask` that starts the work in another
    thread.
    """
    waiting: deque[Future[_Answer]] = deque()
    try:
        for batch in batches:
            waiting.append(ask(batch))
            while waiting and (len(waiting) >= in_flight or waiting[0].done()):
                answer = waiting[0].result()
                waiting.popleft()
                yield answer
        while waiting:
            answer = waiting[0].result()
            waiting.popleft()
            yield answer
    finally:
        for future in waiting:
            future.cancel()
