"""Decodes untrusted bytes to RGB pixels.

Each kind of file gives the same pixels with any decoder:

    RGB, L, 1-bit        unchanged
    P, PA, LA, RGBA      over a white background, transparency of the palette included; a BMP whose
                         alpha is 0 everywhere is opaque
    CMYK, YCCK           by Pillow's conversion; embedded ICC profiles are ignored, as in the
                         training of CLIP and MLCD
    I;16, I (0..65535)   scaled to 8 bits, rounded; for TIFF, by its bit depth and white level
    F, LAB, other I      refused: their range is ambiguous
    animations           the first frame
    EXIF orientation     applied, or ignored for parity with CLIP's training pipeline (TIFF and
                         HEIC store it in a field of the format, which is always applied)
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.Image import Transpose

from mlcd.errors import ImageRejected
from mlcd.images.bounded import BoundedFile, check_scans
from mlcd.images.heic import HEIC, has_heic, is_heic, open_heic
from mlcd.images.jpeg import decode_shrunk, has_simplejpeg, require_simplejpeg
from mlcd.images.jpeg_end import load_without_end
from mlcd.images.png import drop_unneeded_chunks, scale_transparency
from mlcd.images.tiff import check_layout, gray_range, refuse_unknown_layout

ExifPolicy = Literal["apply", "ignore"]

# Formats that Pillow reads. MPO files of many phones open as JPEG. EPS and PDF are excluded because
# they run interpreters.
FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
_JPEG: Final = ("JPEG", "MPO")
_WHITE: Final = (255, 255, 255)
_TRANSPARENT_MODES: Final = ("RGBA", "LA", "PA", "La", "RGBa")
_PLAIN_MODES: Final = ("RGB", "L", "1", "P", "CMYK", "YCbCr", "RGBX", "HSV")
_DAMAGED: Final = "the image is damaged or incomplete"
_MAX_16_BIT: Final = 65535
_TURNS: Final = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
SIDEWAYS: Final = frozenset(_TURNS[orientation] for orientation in (5, 6, 7, 8))
# turns that put the right edge (below: the bottom edge) at the start of the new rows (columns)
RIGHT_TO_LEFT: Final = frozenset(_TURNS[orientation] for orientation in (2, 3, 6, 7))
BOTTOM_TO_TOP: Final = frozenset(_TURNS[orientation] for orientation in (3, 4, 7, 8))


@dataclass(frozen=True)
class DecodeLimits:
    """The limits on one image.

    max_pixels is compared with the header before a pixel is decoded; its default is Pillow's own
    warning level.
    """

    max_bytes: int = 128 * 2**20
    max_pixels: int = 89_478_485


DEFAULT_LIMITS: Final = DecodeLimits()


@dataclass(frozen=True)
class OpenedImage:
    """An image whose header has been read, but not its pixels.

    It can be decoded once, within the limits given when it was opened.
    """

    data: bytes
    file: Image.Image

    @property
    def num_pixels(self) -> int:
        return self.file.width * self.file.height


@dataclass(frozen=True)
class Scaled:
    """An upright RGB picture at some scale. region: the box of `image` that shows the whole
    picture. full_size: its unscaled width and height.
    """

    image: Image.Image
    region: tuple[float, float, float, float]
    full_size: tuple[int, int]


def decode(
    data: bytes | OpenedImage, *, exif: ExifPolicy = "apply", limits: DecodeLimits = DEFAULT_LIMITS
) -> Image.Image:
    """Returns the image as an RGB picture, by the table above.

    Raises ImageRejected with a stable reason, without the decoder's own message.
    """
    return _decode(data, exif=exif, limits=limits, shortest=None).image


def decode_scaled(
    data: bytes | OpenedImage,
    *,
    shortest: int,
    exif: ExifPolicy = "apply",
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> Scaled:
    """Decodes like `decode`, but may return a smaller JPEG of at least `shortest` pixels on its
    shortest side.

    It accepts and refuses the same images as `decode`. Raises ConfigInvalid if simplejpeg is not
    installed.
    """
    require_simplejpeg()
    return _decode(data, exif=exif, limits=limits, shortest=lambda _: shortest)


def decode_small(data: bytes, *, longest: int, limits: DecodeLimits = DEFAULT_LIMITS) -> Scaled:
    """Decodes like `decode`, but may return a smaller JPEG of at least `longest` pixels on its
    longest side if simplejpeg is installed.
    """

    def shortest(size: tuple[int, int]) -> int:
        return max(1, math.ceil(longest * min(size) / max(size)))

    return _decode(
        data, exif="apply", limits=limits, shortest=shortest if has_simplejpeg() else None
    )


def list_formats() -> tuple[str, ...]:
    """Returns the formats that the installed packages can read."""
    return (*FORMATS, HEIC) if has_heic() else FORMATS


def format_of(data: bytes) -> str:
    """Returns one of FORMATS, "HEIC" or "other", from only the first bytes."""
    if is_heic(data):
        return HEIC
    Image.init()
    start = data[:16].ljust(16, b"\0")
    matching = (name for name in FORMATS if Image.OPEN[name][1](start))  # type: ignore[misc]
    return next(matching, "other")


def num_pixels(data: bytes, *, limits: DecodeLimits = DEFAULT_LIMITS) -> int:
    """Returns width times height, from only the header.

    Raises ImageRejected if `decode` would reject the header.
    """
    opened = open_image(data, limits=limits)
    with opened.file:
        return opened.num_pixels


def open_image(data: bytes, *, limits: DecodeLimits = DEFAULT_LIMITS) -> OpenedImage:
    """Reads only the header. Raises the errors of `num_pixels`."""
    _check_length(data, limits)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OpenedImage(data, _open(data, limits))
    except ImageRejected:
        raise
    except Exception as error:  # as in _decode
        raise ImageRejected("undecodable", _DAMAGED) from error


def _decode(
    source: bytes | OpenedImage,
    *,
    exif: ExifPolicy,
    limits: DecodeLimits,
    shortest: Callable[[tuple[int, int]], int] | None,
) -> Scaled:
    """Decodes an image.

    shortest: returns, from the full size, the smallest allowed shortest side of a reduced JPEG in
    pixels; None: every image is decoded whole.
    """
    opened = source if isinstance(source, OpenedImage) else open_image(source, limits=limits)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Pillow's warnings about odd metadata; errors are still raised
            with opened.file as image:
                small = (
                    None
                    if shortest is None
                    else decode_shrunk(opened.data, image, shortest=shortest(image.size))
                )
                picture, extent = small or (_load(image, opened.data), image.size)
                # The EXIF of the whole file decides, before conversions drop it.
                turn = turn_of(image) if exif == "apply" else None
                return _upright(picture, extent, image.size, turn)
    except ImageRejected:
        raise
    except (
        Exception
    ) as error:  # decoders fed with hostile bytes raise anything: struct.error, SyntaxError, …
        raise ImageRejected("undecodable", _DAMAGED) from error


def _upright(
    picture: Image.Image,
    extent: tuple[float, float],
    full_size: tuple[int, int],
    turn: Transpose | None,
) -> Scaled:
    (width, height), slack = extent, (picture.width - extent[0], picture.height - extent[1])
    if turn in SIDEWAYS:
        width, height, slack, full_size = height, width, slack[::-1], full_size[::-1]
    x = slack[0] if turn in RIGHT_TO_LEFT else 0
    y = slack[1] if turn in BOTTOM_TO_TOP else 0
    rgb = _to_rgb(picture if turn is None else picture.transpose(turn))
    return Scaled(rgb, (x, y, x + width, y + height), full_size)


def _check_length(data: bytes, limits: DecodeLimits) -> None:
    if not data:
        raise ImageRejected("empty", "the file is empty")
    if len(data) > limits.max_bytes:
        raise ImageRejected(
            "too-many-bytes", f"{len(data)} bytes, more than the limit of {limits.max_bytes}"
        )


def _open(data: bytes, limits: DecodeLimits) -> Image.Image:
    kind = format_of(data)
    file = BoundedFile(drop_unneeded_chunks(data) if kind == "PNG" else data)
    try:
        image = open_heic(file) if kind == HEIC else Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageRejected(
            "too-many-pixels", f"more than the limit of {limits.max_pixels} pixels"
        ) from error
    except UnidentifiedImageError as error:
        _refuse_unidentified(data, kind, error)
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageRejected(
            "too-many-pixels",
            f"{width} x {height} pixels, more than the limit of {limits.max_pixels}",
        )
    if image.format in _JPEG:
        check_scans(data)
    elif image.format == "TIFF":
        check_layout(image)
    file.allow_pixels()
    return image


def _refuse_unidentified(data: bytes, kind: str, error: UnidentifiedImageError) -> NoReturn:
    """Raises ImageRejected; a file with the first bytes of one of FORMATS is damaged."""
    if kind == "other":
        formats = ", ".join(list_formats())
        raise ImageRejected("unsupported-format", f"not one of {formats}") from error
    if kind == "TIFF":
        refuse_unknown_layout(data)
    raise ImageRejected("undecodable", _DAMAGED) from error


def _load(image: Image.Image, data: bytes) -> Image.Image:
    """Returns the picture with its pixels; integers of more than 8 bits are brought to 8."""
    num_pixels = image.width * image.height
    try:
        image.load()
    except OSError:
        picture = load_without_end(data) if image.format in _JPEG else None
        if picture is None:
            raise
        return picture
    if image.width * image.height > num_pixels:  # HEIC: the stream may differ from the header
        raise ImageRejected("undecodable", "more pixels than its header states")
    if image.format == "PNG":
        scale_transparency(image, data)
    if image.format == "BMP" and image.mode == "RGBA" and image.getchannel("A").getbbox() is None:
        return image.convert("RGB")
    if image.mode.startswith("I"):
        tiff = image.format == "TIFF"
        return _from_integers(image, *(gray_range(image) if tiff else (_MAX_16_BIT, False)))
    return image


def turn_of(image: Image.Image) -> Transpose | None:
    """Returns the turn that makes a picture upright, by its EXIF."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 - a broken EXIF block must not reject the picture
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _TRANSPARENT_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", rgba.size, _WHITE)
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    if image.mode not in _PLAIN_MODES:
        raise ImageRejected(
            "unsupported-format", f"the range of pixels of mode {image.mode} is not defined"
        )
    return image.convert("RGB")


def _from_integers(image: Image.Image, highest: int, inverted: bool) -> Image.Image:  # noqa: FBT001
    """Scales 0..highest to 0..255; inverted: `highest` is black."""
    values = np.asarray(image)
    if values.size and (values.min() < 0 or values.max() > highest):
        raise ImageRejected("unsupported-format", f"integer pixels must be in 0..{highest}")
    levels = ((np.arange(highest + 1) * 255 + highest // 2) // highest).astype(np.uint8)
    return Image.fromarray((levels[::-1] if inverted else levels)[values])
