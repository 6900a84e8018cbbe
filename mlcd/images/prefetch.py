"""Decoding ahead of the consumer in a bounded pool of threads; Pillow releases the interpreter's
lock.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ImageRejected
from mlcd.images.entries import Entry
from mlcd.images.source import Source
from mlcd.images.transform import PreprocessSpec


@dataclass(frozen=True)
class Prepared:
    """One entry, ready for an encoder: uint8 [3, H, W], or the reason why not."""

    entry: Entry
    sha256: bytes
    pixels: NDArray[np.uint8] | None
    rejection: ImageRejected | None = None


def prepare_all(
    source: Source,
    entries: Iterable[Entry],
    spec: PreprocessSpec,
    *,
    num_threads: int,
    ahead: int = 64,
) -> Iterator[Prepared]:
    """Yields every entry in order; at most `ahead` images wait in memory."""

    def prepare(entry: Entry) -> Prepared:
        sha256 = b"\0" * 32
        try:
            data = source.read(entry)
            sha256 = hashlib.sha256(data).digest()
            return Prepared(entry, sha256, spec.prepare(data))
        except ImageRejected as rejection:
            return Prepared(entry, sha256, None, rejection)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="decode") as pool:
        waiting: deque[Future[Prepared]] = deque()
        try:
            for entry in entries:
                waiting.append(pool.submit(prepare, entry))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
