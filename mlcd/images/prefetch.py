"""Decodes images ahead of the consumer in a bounded thread pool; Pillow releases the interpreter's
lock.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ImageRejected
from mlcd.images.entries import Entry
from mlcd.images.pixel_issues import pixel_scores
from mlcd.images.source import Source
from mlcd.images.thumbnail import Thumbnail, thumbnail
from mlcd.images.transform import PreprocessSpec

_AHEAD: Final = 64  # decoded images that wait in memory
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Prepared:
    """One entry, ready for an encoder: pixels uint8 [3, H, W], or a rejection."""

    entry: Entry
    sha256: bytes
    pixels: NDArray[np.uint8] | None
    rejection: ImageRejected | None = None


def prepare_all(
    source: Source,
    entries: Sequence[Entry],
    spec: PreprocessSpec,
    *,
    num_threads: int,
    ahead: int = _AHEAD,
) -> Iterator[Prepared]:
    """Yields every entry in order; at most `ahead` decoded images wait in memory."""

    def prepare(entry: Entry) -> Prepared:
        sha256 = b"\0" * 32
        try:
            data = source.read(entry)
            sha256 = hashlib.sha256(data).digest()
            return Prepared(entry, sha256, spec.prepare(data))
        except ImageRejected as rejection:
            return Prepared(entry, sha256, None, rejection)

    with source.ahead(entries):
        yield from _in_order(prepare, entries, num_threads=num_threads, ahead=ahead)


def thumbnails_all(
    source: Source, entries: Sequence[Entry], *, side: int, num_threads: int
) -> Iterator[tuple[Entry, Thumbnail | None]]:
    """Yields every entry in order with its thumbnail, or None if the image cannot be used."""

    def make(entry: Entry) -> tuple[Entry, Thumbnail | None]:
        try:
            return entry, thumbnail(source.read(entry), side=side)
        except ImageRejected:
            return entry, None

    with source.ahead(entries):
        yield from _in_order(make, entries, num_threads=num_threads)


def scores_all(
    source: Source, entries: Sequence[Entry], *, num_threads: int
) -> Iterator[NDArray[np.float64] | None]:
    """Yields the pixel scores of every entry in order, or None if the image cannot be used."""

    def score(entry: Entry) -> NDArray[np.float64] | None:
        try:
            return pixel_scores(source.read(entry))
        except ImageRejected:
            return None

    with source.ahead(entries):
        yield from _in_order(score, entries, num_threads=num_threads)


def _in_order(
    work: Callable[[Entry], _Result],
    entries: Iterable[Entry],
    *,
    num_threads: int,
    ahead: int = _AHEAD,
) -> Iterator[_Result]:
    """Yields the result of each entry in order; at most `ahead` results wait in memory."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="decode") as pool:
        waiting: deque[Future[_Result]] = deque()
        try:
            for entry in entries:
                waiting.append(pool.submit(work, entry))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
