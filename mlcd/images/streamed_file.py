"""A file that is read sequentially, in ranges that are requested ahead."""

import io
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mlcd.images.checksums import Checksum


class StreamedFile(io.RawIOBase):
    """The file. Readers may seek back a few bytes, or ahead, which reads the bytes between."""

    def __init__(
        self,
        begin: Callable[[int, int], Future[bytes]],
        size: int,
        *,
        range_bytes: int,
        ahead: int,
        checksum: Checksum | None,
    ) -> None:
        """begin: starts to read from one offset to another. ahead: number of concurrent
        requests.
        """
        self._begin, self._size, self._checksum = begin, size, checksum
        self._starts = iter(range(0, size, range_bytes))
        self._range_bytes, self._ahead = range_bytes, ahead
        self._begun: list[Future[bytes]] = []
        # in memory, from offset `_start`: the last range and the range before it
        self._before, self._last, self._start = b"", b"", 0
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads some bytes, none at the end. Raises the errors of reading the ranges."""
        while self._end <= self._position and self._advance():
            pass
        at = self._position - self._start
        if at < 0:
            raise io.UnsupportedOperation("the reader went back too far")
        if at < len(self._before):
            chunk = self._before[at : at + len(buffer)]
        else:
            at -= len(self._before)
            chunk = self._last[at : at + len(buffer)]
        buffer[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)

    def finish(self) -> None:
        """Reads the rest, for the checksum."""
        while self._checksum is not None and self._advance():
            pass

    @property
    def _end(self) -> int:
        return self._start + len(self._before) + len(self._last)

    def _advance(self) -> bool:
        """Takes the next range into memory; False at the end of the file."""
        while len(self._begun) < self._ahead and (start := next(self._starts, None)) is not None:
            self._begun.append(self._begin(start, min(start + self._range_bytes, self._size)))
        if not self._begun:
            return False
        data = self._begun.pop(0).result()
        if self._checksum is not None:
            self._checksum.update(data)
        self._start += len(self._before)
        self._before, self._last = self._last, data
        return bool(data)
