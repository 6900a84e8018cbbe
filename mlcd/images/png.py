"""Corrections of how Pillow reads PNG.

Chunks that no pixel needs are passed over, as in browsers, and a transparent value is compared at
the depth of the file.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Final

from PIL import Image

_SIGNATURE_BYTES: Final = 8
_AROUND_BYTES: Final = 12  # length, kind and checksum of a chunk
# 100 megapixels in chunks of 8 KiB; behind these, Pillow and BoundedFile decide.
_MAX_CHUNKS: Final = 20_000
_KIND: Final = re.compile(rb"[A-Za-z]{4}")
_ANCILLARY: Final = 0x20
_PALETTE, _GRAY, _COLORS = 3, 0, 2
_BYTE: Final = 8
# Pillow refuses the picture where these are shorter: three of metadata, and a transparent value.
_LEAST_BYTES: Final = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9}
_LEAST_TRANSPARENCY: Final = {_GRAY: 2, _COLORS: 6}
# Profiles and further frames are never used.
_UNUSED: Final = frozenset([b"iCCP", b"acTL", b"fcTL", b"fdAT"])
_TEXTS: Final = frozenset([b"tEXt", b"zTXt", b"iTXt"])
# The texts that may hold an orientation.
_ORIENTING: Final = frozenset([b"XML:com.adobe.xmp", b"Raw profile type exif"])
_MAX_TEXT_BYTES: Final = 2**20  # Pillow's own limit, beyond which it refuses the picture


def drop_unneeded_chunks(png: bytes) -> bytes:
    """Returns the PNG without the ancillary chunks that could cost the picture.

    These are profiles, texts, further frames, and any with a wrong checksum or too short. The
    orientation is kept. Where nothing is dropped the result is `png` itself.
    """
    view, color = memoryview(png), png[25] if len(png) > 25 else _PALETTE
    before: list[memoryview] = [view[:_SIGNATURE_BYTES]]
    behind: list[memoryview] = []  # of the pixels; chunks of these have to follow one another
    orienting: set[bytes] = set()
    end, dropped, has_pixels = _SIGNATURE_BYTES, False, False
    for kind, start, end in _chunks(png):
        has_pixels |= kind == b"IDAT"
        if not (kind[0] & _ANCILLARY or (kind == b"PLTE" and color != _PALETTE)):
            before.append(view[start:end])
        elif _is_needed(kind, view[start:end], color, orienting):
            (behind if has_pixels else before).append(view[start:end])
        else:
            dropped = True
    return b"".join([*before, *behind, view[end:]]) if dropped else png


def scale_transparency(image: Image.Image, png: bytes) -> None:
    """Brings the one transparent value of a PNG to the range of the pixels.

    Pillow spreads gray of 1, 2 and 4 bits over 0..255 and leaves the value as the file has it. Of
    16-bit colors it keeps the high bytes, so that none can be told from its neighbors.
    """
    value, bits = image.info.get("transparency"), png[24]
    if bits > _BYTE:
        image.info.pop("transparency", None)
    elif image.mode == "L" and isinstance(value, int):
        white = 2**bits - 1
        image.info["transparency"] = (value & white) * 255 // white


def _chunks(png: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields kind, start and end of each whole chunk before the end of the image."""
    start = _SIGNATURE_BYTES
    for _ in range(_MAX_CHUNKS):
        kind = png[start + 4 : start + 8]
        end = start + _AROUND_BYTES + int.from_bytes(png[start : start + 4], "big")
        if end > len(png) or kind == b"IEND" or not _KIND.fullmatch(kind):
            return
        yield kind, start, end
        start = end


def _is_needed(kind: bytes, chunk: memoryview, color: int, orienting: set[bytes]) -> bool:
    """Tells whether an ancillary chunk belongs to the picture, or at least does no harm.

    orienting: keywords of the texts that are kept already; each is kept once.
    """
    if kind in _UNUSED or zlib.crc32(chunk[4:-4]) != int.from_bytes(chunk[-4:], "big"):
        return False
    if kind in _TEXTS:
        keyword = bytes(chunk[8 : 8 + 80]).split(b"\0")[0]
        if keyword not in _ORIENTING - orienting:
            return False
        orienting.add(keyword)
        return _is_short(kind, bytes(chunk[8 + len(keyword) + 1 : -4]))
    least = _LEAST_TRANSPARENCY.get(color, 0) if kind == b"tRNS" else _LEAST_BYTES.get(kind, 0)
    return len(chunk) - _AROUND_BYTES >= least


def _is_short(kind: bytes, text: bytes) -> bool:
    """Tells whether what follows a text's keyword unpacks to little, or is not packed."""
    if kind == b"zTXt" and text[:1] == b"\0":
        packed = text[1:]
    elif kind == b"iTXt" and text[:2] == b"\1\0":
        packed = text[2:].split(b"\0", 2)[-1]
    else:
        return kind != b"zTXt" and len(text) <= _MAX_TEXT_BYTES
    unpacking = zlib.decompressobj()
    try:
        unpacking.decompress(packed, _MAX_TEXT_BYTES)
    except zlib.error:
        return False
    return not unpacking.unconsumed_tail
