"""Corrects how Pillow reads PNG: drops chunks that no pixel needs, as browsers do, and compares a
transparent value at the bit depth of the file.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Final

from PIL import Image

_SIGNATURE_BYTES: Final = 8
_OVERHEAD_BYTES: Final = 12  # length, kind and checksum of a chunk
# enough for 100 megapixels in chunks of 8 KiB; after these, Pillow and BoundedFile decide
_MAX_CHUNKS: Final = 20_000
_KIND: Final = re.compile(rb"[A-Za-z]{4}")
_ANCILLARY: Final = 0x20
_PALETTE, _GRAY, _COLORS = 3, 0, 2
_BYTE: Final = 8
# Pillow refuses an image if these chunks (metadata, and a transparent value) are shorter.
_MIN_BYTES: Final = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9}
_MIN_TRANSPARENCY: Final = {_GRAY: 2, _COLORS: 6}
# Profiles and further frames are never used.
_UNUSED: Final = frozenset([b"iCCP", b"acTL", b"fcTL", b"fdAT"])
_TEXTS: Final = frozenset([b"tEXt", b"zTXt", b"iTXt"])
# The texts that may contain an orientation.
_ORIENTING: Final = frozenset([b"XML:com.adobe.xmp", b"Raw profile type exif"])
_MAX_TEXT_BYTES: Final = 2**20  # Pillow's own limit; it refuses an image with a longer text


def drop_unneeded_chunks(png: bytes) -> bytes:
    """Returns the PNG without the ancillary chunks that could make Pillow refuse it.

    Drops profiles, texts, further frames, and chunks that are too short or have a wrong checksum;
    keeps the orientation. Returns `png` itself if nothing is dropped.
    """
    view, color = memoryview(png), png[25] if len(png) > 25 else _PALETTE
    before: list[memoryview] = [view[:_SIGNATURE_BYTES]]
    after: list[memoryview] = []  # ancillary chunks after the pixels, whose chunks must be adjacent
    orienting: set[bytes] = set()
    end, dropped, has_pixels = _SIGNATURE_BYTES, False, False
    for kind, start, end in _chunks(png):
        has_pixels |= kind == b"IDAT"
        if not (kind[0] & _ANCILLARY or (kind == b"PLTE" and color != _PALETTE)):
            before.append(view[start:end])
        elif _is_needed(kind, view[start:end], color, orienting):
            (after if has_pixels else before).append(view[start:end])
        else:
            dropped = True
    return b"".join([*before, *after, view[end:]]) if dropped else png


def scale_transparency(image: Image.Image, png: bytes) -> None:
    """Scales the transparent value of a PNG to the range of the pixels.

    Pillow scales gray of 1, 2 and 4 bits to 0..255, but not the transparent value. Of 16-bit colors
    Pillow keeps only the high bytes, which do not identify a color, so the value is removed.
    """
    value, bits = image.info.get("transparency"), png[24]
    if bits > _BYTE:
        image.info.pop("transparency", None)
    elif image.mode == "L" and isinstance(value, int):
        white = 2**bits - 1
        image.info["transparency"] = (value & white) * 255 // white


def _chunks(png: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields kind, start and end of each complete chunk before IEND."""
    start = _SIGNATURE_BYTES
    for _ in range(_MAX_CHUNKS):
        kind = png[start + 4 : start + 8]
        end = start + _OVERHEAD_BYTES + int.from_bytes(png[start : start + 4], "big")
        if end > len(png) or kind == b"IEND" or not _KIND.fullmatch(kind):
            return
        yield kind, start, end
        start = end


def _is_needed(kind: bytes, chunk: memoryview, color: int, orienting: set[bytes]) -> bool:
    """Tells whether an ancillary chunk belongs to the image, or at least does no harm.

    orienting: keywords of the texts kept so far; a second text with the same keyword is dropped.
    """
    if kind in _UNUSED or zlib.crc32(chunk[4:-4]) != int.from_bytes(chunk[-4:], "big"):
        return False
    if kind in _TEXTS:
        keyword = bytes(chunk[8 : 8 + 80]).split(b"\0")[0]
        if keyword not in _ORIENTING - orienting:
            return False
        orienting.add(keyword)
        return _is_short(kind, bytes(chunk[8 + len(keyword) + 1 : -4]))
    min_bytes = _MIN_TRANSPARENCY.get(color, 0) if kind == b"tRNS" else _MIN_BYTES.get(kind, 0)
    return len(chunk) - _OVERHEAD_BYTES >= min_bytes


def _is_short(kind: bytes, text: bytes) -> bool:
    """Tells whether a text, after decompression, has at most _MAX_TEXT_BYTES.

    text: chunk's data after the keyword.
    """
    if kind == b"zTXt" and text[:1] == b"\0":
        compressed = text[1:]
    elif kind == b"iTXt" and text[:2] == b"\1\0":
        compressed = text[2:].split(b"\0", 2)[-1]
    else:
        return kind != b"zTXt" and len(text) <= _MAX_TEXT_BYTES
    decompressor = zlib.decompressobj()
    try:
        decompressor.decompress(compressed, _MAX_TEXT_BYTES)
    except zlib.error:
        return False
    return not decompressor.unconsumed_tail
