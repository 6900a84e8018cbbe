"""JPEGs that hold every pixel and not the two bytes that end them.

libjpeg waits for more bytes, so that Pillow calls such a file truncated; with an end appended it
would fill missing pixels with gray and say nothing. So the picture is decoded with several fillings
before the appended end: it is whole where none of them changes a pixel.
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
# Each filling costs a pass for each scan; encoders write about ten scans.
_MAX_SCANS: Final = 16
_PATTERNS: Final = (b"\0", b"\x55", b"\xaa", b"\x36\xc9\x1b", b"\x9c\x6e\x43\xf1\x08")
_FILLING_BYTES: Final = 64
_COEFFICIENTS: Final = 64
_ROWS: Final = 256  # that are compared at a time


def load_without_end(jpeg: bytes) -> Image.Image | None:
    """Returns the decoded picture of a JPEG without an end; None where pixels may be missing."""
    jpeg = jpeg.rstrip(_END[:1])
    if not _has_all_scans(jpeg):
        return None
    pictures = set()
    for filling in (b"", *_fillings(jpeg)):
        file = BoundedFile(jpeg + filling + _END)
        image = Image.open(file, formats=["JPEG"])
        file.allow_pixels()
        image.load()
        pictures.add(_digest(image))
        if len(pictures) > 1:
            return None
    return image


def _has_all_scans(jpeg: bytes) -> bool:
    """Tells whether few scans cover each coefficient of each component to its last bit."""
    missing: set[tuple[int, int]] = set()
    num_scans = 0
    for marker, start in jpeg_markers(jpeg):
        if marker in FRAMES:
            components = range(start + 8, start + 8 + 3 * jpeg[start + 7], 3)
            missing = {(jpeg[at], number) for at in components for number in range(_COEFFICIENTS)}
        elif marker == _SCAN:
            num_scans += 1
            after = start + 3 + 2 * jpeg[start + 2]
            first, last, position = jpeg[after : after + 3]
            if position & 0xF == 0:
                missing -= {
                    (component, number)
                    for component in jpeg[start + 3 : after : 2]
                    for number in range(first, last + 1)
                }
    return not missing and num_scans <= _MAX_SCANS


def _fillings(jpeg: bytes) -> Iterator[bytes]:
    """Yields bytes that decode to different pixels wherever pixels are missing.

    They are repeated behind each restart marker that may come next: a decoder that waits for one
    skips what comes before it.
    """
    last = max(range(len(_RESTARTS)), key=lambda number: jpeg.rfind(_RESTARTS[number]))
    restarts = _RESTARTS[last + 1 :] + _RESTARTS[: last + 1]
    for pattern in _PATTERNS:
        filling = pattern * (_FILLING_BYTES // len(pattern))
        yield filling.join([b"", *restarts, b""])


def _digest(image: Image.Image) -> bytes:
    digest = hashlib.sha256()
    for top in range(0, image.height, _ROWS):
        strip = (0, top, image.width, min(top + _ROWS, image.height))
        digest.update(image.crop(strip).tobytes())
    return digest.digest()
