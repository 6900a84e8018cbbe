"""Corrects how Pillow reads TIFF: reads the range of gray of more than 8 bits from the tags, and
refuses layouts that Pillow reads wrongly.
"""

import contextlib
import warnings
from typing import Final, cast

from PIL import Image, TiffImagePlugin
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from mlcd.errors import ImageRejected
from mlcd.images.bounded import BoundedFile

_WHITE_IS_ZERO: Final = 0
_SIGNED: Final = 2
_SEPARATE_PLANES: Final = 2
_UNCOMPRESSED: Final = 1
_BYTE, _TWO_BYTES = 8, 16
_REQUIRED: Final = (
    TiffImagePlugin.IMAGEWIDTH,
    TiffImagePlugin.IMAGELENGTH,
    TiffImagePlugin.PHOTOMETRIC_INTERPRETATION,
)
_BIG_TIFF: Final = 43  # its header has 16 bytes


def check_layout(image: Image.Image) -> None:
    """Raises ImageRejected for layouts that Pillow accepts but reads wrongly: compressed signed
    big-endian integers, and uncompressed planes of 16 bits.
    """
    tags = cast("TiffImageFile", image).tag_v2
    uncompressed = tags.get(TiffImagePlugin.COMPRESSION, _UNCOMPRESSED) == _UNCOMPRESSED
    num_bits = _num_bits(tags)
    signed = _SIGNED in tags.get(TiffImagePlugin.SAMPLEFORMAT, ())
    swapped = not uncompressed and tags.prefix == TiffImagePlugin.MM
    planes = (
        tags.get(TiffImagePlugin.PLANAR_CONFIGURATION) == _SEPARATE_PLANES
        and tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1) > 1
    )
    if num_bits > _BYTE and ((signed and swapped) or (planes and uncompressed)):
        raise _layout_rejection(tags)


def refuse_unknown_layout(tiff: bytes) -> None:
    """Raises ImageRejected with the layout of a TIFF that Pillow does not support; returns if its
    tags cannot be read.
    """
    rejection = None
    with contextlib.suppress(Exception), warnings.catch_warnings():  # damage may raise any error
        warnings.simplefilter("error")
        file = BoundedFile(tiff)
        header = file.read(8)
        tags = ImageFileDirectory_v2(header + file.read(8 * (header[2] == _BIG_TIFF)))
        file.seek(tags.next)
        tags.load(file)
        if all(tag in tags for tag in _REQUIRED):
            rejection = _layout_rejection(tags)
    if rejection is not None:
        raise rejection


def gray_range(image: Image.Image) -> tuple[int, bool]:
    """Returns the largest possible value of the file's integers, and whether it means black."""
    tags = cast("TiffImageFile", image).tag_v2
    inverted = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO
    return 2 ** min(_num_bits(tags), _TWO_BYTES) - 1, inverted


def _num_bits(tags: ImageFileDirectory_v2) -> int:
    return max(map(int, tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,))))


def _layout_rejection(tags: ImageFileDirectory_v2) -> ImageRejected:
    return ImageRejected(
        "unsupported-format",
        f"unsupported layout: a TIFF of {_num_bits(tags)} bits, photometric interpretation"
        f" {int(tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION, 0))}",
    )
