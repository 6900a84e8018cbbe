"""Reads images of tar shards in a store, many images per range request."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Final

from mlcd.errors import ImageRejected
from mlcd.images.decode import DEFAULT_LIMITS
from mlcd.images.entries import Entry
from mlcd.images.read_ahead import Wait
from mlcd.images.remote_files import RANGE_BYTES

# offset of a shard's member that cannot be read as an image
NOWHERE: Final = -1
_MOST_BETWEEN: Final = 1 << 20  # bytes between two images up to which both share a range


def spans_ahead(
    entries: Iterable[Entry],
    pool: Executor,
    read_span: Callable[[bytes, int, int], bytes],
    read_alone: Callable[[Entry], bytes],
) -> Iterator[tuple[Entry, Wait]]:
    """Yields each entry and a function that waits for its bytes, as `ReadAhead` requires.

    read_span: reads a shard between two offsets. read_alone: reads an entry outside of all spans.
    """
    for span in _spans(entries):
        path, start = span[0].locator
        if _is_alone(span[0]):
            yield span[0], partial(read_alone, span[0])
            continue
        future = pool.submit(read_span, path, start, _end(span[-1]))
        for entry in span:
            yield entry, partial(_cut, future, entry, start)


def _spans(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Divides entries, in order, into lists that are read as one range."""
    span: list[Entry] = []
    for entry in entries:
        if span and not _continues(span, entry):
            yield span
            span = []
        span.append(entry)
    if span:
        yield span


def _continues(span: list[Entry], entry: Entry) -> bool:
    if _is_alone(span[0]) or _is_alone(entry):
        return False
    (first_path, start), (path, offset), end = span[0].locator, entry.locator, _end(span[-1])
    is_near: bool = path == first_path and end <= offset <= end + _MOST_BETWEEN
    return is_near and _end(entry) - start <= RANGE_BYTES


def _is_alone(entry: Entry) -> bool:
    return bool(entry.locator[1] == NOWHERE) or entry.size_bytes > DEFAULT_LIMITS.max_bytes


def _end(entry: Entry) -> int:
    return int(entry.locator[1]) + entry.size_bytes


def _cut(span: Future[bytes], entry: Entry, start: int) -> bytes:
    at = entry.locator[1] - start
    data = span.result()[at : at + entry.size_bytes]
    if len(data) != entry.size_bytes:
        raise ImageRejected("unreadable", "the shard ends inside this image")
    return data
