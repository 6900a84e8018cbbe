"""Decodes JPEGs that contain every pixel but lack the end marker (two bytes).

libjpeg expects more bytes, so Pillow calls such a file truncated; with an end marker appended,
libjpeg would silently fill missing pixels with gray. So the image is decoded several times, with
different filler bytes before the marker: it is complete if no filler changes a pixel.
"""

import hashlib
from collections.abc import Iterator
from typing import Final

from PIL import Image

from mlcd.images.bounded import BoundedFile, jpeg_markers
from mlcd.images.jpeg import FRAMES

_RESTARTS: Final = [bytes([0xFF, marker]) for marker in range(0xD0, 0xD8)]
_END: Final = b"\xff\xd9"
_SCAN: Final = 0xDA
# Each filler costs a pass per scan; encoders write about ten scans.
_MAX_SCANS: Final = 16
_PATTERNS: Final = (b"\0", b"\x55", b"\xaa", b"\x36\xc9\x1b", b"\x9c\x6e\x43\xf1\x08")
_FILLER_BYTES: Final = 64
_COEFFICIENTS: Final = 64
_DIGEST_ROWS: Final = 256  # rows that are hashed at a time


def load_without_end(jpeg: bytes) -> Image.Image | None:
    """Decodes a JPEG without an end marker; returns None if pixels may be missing."""
    jpeg = jpeg.rstrip(_END[:1])
    if not _has_all_scans(jpeg):
        return None
    digests = set()
    for filler in (b"", *_make_fillers(jpeg)):
        file = BoundedFile(jpeg + filler + _END)
        image = Image.open(file, formats=["JPEG"])
        file.allow_pixels()
        image.load()
        digests.add(_digest(image))
        if len(digests) > 1:
            return None
    return image


def _has_all_scans(jpeg: bytes) -> bool:
    """Tells whether at most _MAX_SCANS scans cover all bits of each component's coefficients."""
    missing: set[tuple[int, int]] = set()
    num_scans = 0
    for marker, start in jpeg_markers(jpeg):
        if marker in FRAMES:
            components = range(start + 8, start + 8 + 3 * jpeg[start + 7], 3)
            missing = {(jpeg[at], index) for at in components for index in range(_COEFFICIENTS)}
        elif marker == _SCAN:
            num_scans += 1
            end = start + 3 + 2 * jpeg[start + 2]  # of the scan's list of components
            first, last, bit_positions = jpeg[end : end + 3]
            if bit_positions & 0xF == 0:
                missing -= {
                    (component, index)
                    for component in jpeg[start + 3 : end : 2]
                    for index in range(first, last + 1)
                }
    return not missing and num_scans <= _MAX_SCANS


def _make_fillers(jpeg: bytes) -> Iterator[bytes]:
    """Yields bytes that decode to different pixels wherever pixels are missing.

    They are repeated after each restart marker that may come next, because a decoder that expects
    a marker skips all bytes before it.
    """
    last = max(range(len(_RESTARTS)), key=lambda number: jpeg.rfind(_RESTARTS[number]))
    restarts = _RESTARTS[last + 1 :] + _RESTARTS[: last + 1]
    for pattern in _PATTERNS:
        filler = pattern * (_FILLER_BYTES // len(pattern))
        yield filler.join([b"", *restarts, b""])


def _digest(image: Image.Image) -> bytes:
    digest = hashlib.sha256()
    for top in range(0, image.height, _DIGEST_ROWS):
        strip = (0, top, image.width, min(top + _DIGEST_ROWS, image.height))
        digest.update(image.crop(strip).tobytes())
    return digest.digest()
