"""Decodes JPEG at a fraction of its size: libjpeg-turbo's inverse DCT skips pixels that a resize
would drop.

Only images without any irregularity are decoded here. Pillow decodes all other images, so that in
both decode modes Pillow decides what is an image and what is damaged.
"""

from typing import Final

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command_for

_BASELINE, _EXTENDED, _PROGRESSIVE = 0xC0, 0xC1, 0xC2
# the markers of frames; three markers in this range have other uses: DHT, JPG and DAC
FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_HUFFMAN: Final = (_BASELINE, _EXTENDED, _PROGRESSIVE)
_MAX_SEGMENTS: Final = 1024
_END: Final = b"\xff\xd9"
# horizontal and vertical sampling of the luma, relative to colors without any: 4:4:4, 4:2:2, 4:2:0,
# 4:4:0, 4:1:1
_SAMPLINGS: Final = ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1))
_WHOLE: Final = 8


def require_simplejpeg() -> None:
    """Raises ConfigInvalid, with the install command, if the decoder is not installed."""
    if not has_simplejpeg():
        raise ConfigInvalid(
            "decode fast needs simplejpeg, which is not installed",
            remedy=f"{install_command_for('simplejpeg', likely='serve')}, or use decode exact",
        )


def has_simplejpeg() -> bool:
    """Tells whether the decoder is installed."""
    try:
        import simplejpeg  # noqa: F401
    except ImportError:
        return False
    return True


def decode_shrunk(
    data: bytes, image: Image.Image, *, shortest: int
) -> tuple[Image.Image, tuple[float, float]] | None:
    """Decodes at the smallest scale (in eighths) that leaves `shortest` pixels on the shortest
    side.

    Returns the image, and the width and height of the part that shows the picture: the last column
    and row may be covered only in part. Returns None if nothing is gained or Pillow must decide:
    another format, CMYK, arithmetic coding, any warning of the decoder.

    image: Pillow's view of the same bytes, opened but not loaded; its header was checked against
    the limits.
    """
    if image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    eighths = _eighths(min(image.size), shortest)
    if eighths >= _WHOLE or _frame(data) not in _HUFFMAN:
        return None
    import simplejpeg

    width, height = (-(-side * eighths // _WHOLE) for side in image.size)
    try:
        full_height, full_width, *_ = simplejpeg.decode_jpeg_header(data)
        # Pillow and libjpeg-turbo read different headers; only Pillow's was checked for limits.
        if (full_width, full_height) != image.size:
            return None
        pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width, strict=True)
    # Pillow accepts such a file, or refuses it with the right reason
    except Exception:  # noqa: BLE001
        return None
    if pixels.shape != (height, width, 3):
        return None
    return Image.fromarray(pixels), (full_width * eighths / _WHOLE, full_height * eighths / _WHOLE)


def is_plain(data: bytes, image: Image.Image) -> bool:
    """Tells whether any JPEG decoder gives the same picture: YCbCr or gray, coded by Huffman, in a
    usual sampling, with its end. image: as in `decode_shrunk`.
    """
    # a subclass, as of MPO, has several pictures
    if type(image) is not JpegImageFile or not data.endswith(_END) or _frame(data) not in _HUFFMAN:
        return False
    components, samplings = zip(*((id_, (x, y)) for id_, x, y, _ in image.layer), strict=True)
    if image.mode == "L":
        return samplings == ((1, 1),)
    is_ycbcr = components == (1, 2, 3) and image.info.get("adobe_transform") != 0
    return is_ycbcr and samplings[0] in _SAMPLINGS and set(samplings[1:]) == {(1, 1)}


def _eighths(side: int, min_pixels: int) -> int:
    """Returns the smallest scale that leaves `min_pixels` of `side`; the last pixel may be covered
    only in part.
    """
    return _WHOLE * (min_pixels - 1) // side + 1


def _frame(data: bytes) -> int | None:
    """Returns the frame marker (the coding process); None if a segment before it is irregular."""
    position = 2
    for _ in range(_MAX_SEGMENTS):
        if data[position : position + 1] != b"\xff":
            return None
        marker, length = (
            data[position + 1],
            int.from_bytes(data[position + 2 : position + 4], "big"),
        )
        if marker in FRAMES:
            return marker
        position += 2 + length
    return None
