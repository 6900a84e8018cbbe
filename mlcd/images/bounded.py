"""Limits the work that a file may cause in addition to its pixels: a few bytes can cause very much.

Measured without these limits: a JPEG of 440 kB with 2,000 scans of 64 megapixels took 102 s to
decode.
"""

import io
import re
from collections.abc import Iterator
from typing import Final

from mlcd.errors import ImageRejected

# scans of a progressive JPEG; encoders write about ten, and each costs a pass over all pixels
MAX_SCANS: Final = 64
# reads of segments, chunks and blocks before the pixels; a real file has a few hundred
_HEADER_READS: Final = 10_000
# reads, about one second's work; Pillow reads run-length BMP byte by byte
_PIXEL_READS: Final = 1_000_000
_BYTES_PER_READ: Final = 64  # smallest average size of further reads
_TIMES_READ: Final = 8  # multiple of the file's size; several tags may refer to the same bytes
_SLACK_BYTES: Final = 2**20
_SCAN, _END = 0xDA, 0xD9
_LOWEST_WITH_LENGTH: Final = 0xC0
_WITHOUT_LENGTH: Final = frozenset({0xD8, _END})
# In entropy-coded data 0xFF is followed by 0 or by a restart; before a marker 0xFF may repeat.
_MARKER: Final = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])", re.DOTALL)


class BoundedFile(io.BytesIO):
    """A file in memory that limits the number and the bytes of a decoder's reads.

    Reading beyond a limit raises ImageRejected.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._num_bytes = len(data)
        self._reads = _HEADER_READS
        self._bytes = _TIMES_READ * len(data) + _SLACK_BYTES

    def allow_pixels(self) -> None:
        """Allows reads of pixels in proportion to the file size. Call it after the header is
        read.
        """
        self._reads += _PIXEL_READS + self._num_bytes // _BYTES_PER_READ

    def read(self, size: int | None = -1, /) -> bytes:
        part = super().read(size)
        self._reads -= 1
        self._bytes -= len(part)
        if min(self._reads, self._bytes) < 0:
            raise ImageRejected("undecodable", "the image is made of too many parts")
        return part


def check_scans(jpeg: bytes) -> None:
    """Raises ImageRejected for a JPEG of more than MAX_SCANS scans."""
    if jpeg.count(b"\xff\xda") <= MAX_SCANS:
        # Data after the image may contain such bytes by chance; the code below counts only markers.
        return
    scans = 0
    for marker, _ in jpeg_markers(jpeg):
        scans += marker == _SCAN
        if scans > MAX_SCANS:
            raise ImageRejected("undecodable", f"a JPEG of more than {MAX_SCANS} scans")


def jpeg_markers(jpeg: bytes) -> Iterator[tuple[int, int]]:
    """Yields each marker before the end of the picture, and the offset after the marker."""
    offset = 0
    while (match := _MARKER.search(jpeg, offset)) and (marker := match[1][0]) != _END:
        offset = match.end()
        yield marker, offset
        if marker >= _LOWEST_WITH_LENGTH and marker not in _WITHOUT_LENGTH:
            offset += int.from_bytes(jpeg[offset : offset + 2], "big")
