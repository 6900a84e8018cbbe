"""Bytes to RGB pixels, for bytes that nobody vouches for.

What each kind of file becomes, whatever the decoder:

RGB, L, 1-bit       as they are
P, PA, LA, RGBA     over a white background, transparency of the palette included
CMYK, YCCK          Pillow's conversion; embedded ICC profiles are ignored, as in CLIP's and MLCD's training
I;16, I (0..65535)  scaled to 8 bits, rounded
F, LAB, other I     refused: there is no single meaning of their range
animations          the first frame
EXIF orientation    applied, or ignored where parity with CLIP's training pipeline is wanted
"""

import io
import warnings
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mlcd.errors import ImageRejected

ExifPolicy = Literal["apply", "ignore"]

# Many phones' MPO files open as JPEG. No EPS, no PDF: they run interpreters.
FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
_WHITE: Final = (255, 255, 255)
_TRANSPARENT_MODES: Final = ("RGBA", "LA", "PA", "La", "RGBa")
_PLAIN_MODES: Final = ("RGB", "L", "1", "P", "CMYK", "YCbCr", "RGBX", "HSV")
_MAX_16_BIT: Final = 65535


@dataclass(frozen=True)
class DecodeLimits:
    """max_pixels is compared with the header before a pixel is decoded (default: Pillow's own warning level)."""

    max_bytes: int = 128 * 2**20
    max_pixels: int = 89_478_485


DEFAULT_LIMITS: Final = DecodeLimits()


def decode(data: bytes, *, exif: ExifPolicy = "apply", limits: DecodeLimits = DEFAULT_LIMITS) -> Image.Image:
    """The image as an RGB picture, by the table above.

    Raises ImageRejected with a stable reason; nothing of the decoder's own text gets out.
    """
    if not data:
        raise ImageRejected("empty", "the file is empty")
    if len(data) > limits.max_bytes:
        raise ImageRejected("too-many-bytes", f"{len(data)} bytes, more than the limit of {limits.max_bytes}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata; errors still raise
            with _open(data, limits) as image:
                image.load()
                # On the whole file's EXIF, before conversions drop it.
                oriented = _oriented(image) if exif == "apply" else image
                return _to_rgb(oriented)
    except ImageRejected:
        raise
    except Exception as error:  # decoders fed with hostile bytes raise anything: struct.error, SyntaxError, …
        raise ImageRejected("undecodable", "the image is damaged or incomplete") from error


def _open(data: bytes, limits: DecodeLimits) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageRejected("too-many-pixels", f"more than the limit of {limits.max_pixels} pixels") from error
    except UnidentifiedImageError as error:
        raise ImageRejected("unsupported-format", f"not one of {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageRejected("too-many-pixels", f"{width} x {height} pixels, more than the limit of {limits.max_pixels}")
    return image


def _oriented(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001 - a broken EXIF block is no reason to lose the picture
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _from_integers(image).convert("RGB")
    if image.mode in _TRANSPARENT_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", rgba.size, _WHITE)
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    if image.mode not in _PLAIN_MODES:
        raise ImageRejected("unsupported-format", f"pixels of mode {image.mode} have no defined range")
    return image.convert("RGB")


def _from_integers(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() > _MAX_16_BIT):
        raise ImageRejected("unsupported-format", "integer pixels outside 0..65535 have no defined range")
    return Image.fromarray(((values * 255 + _MAX_16_BIT // 2) // _MAX_16_BIT).astype(np.uint8))
