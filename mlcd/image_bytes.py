"""The conversion of any kind of image to the bytes that are sent: files unchanged, pixels without
loss.
"""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ImageRejected, InvalidInput

if TYPE_CHECKING:
    from PIL import Image

# a path, the bytes of a file, uint8 pixels [H, W, 3] RGB, [H, W, 4] RGBA or [H, W] gray, or a
# Pillow image
ImageInput: TypeAlias = Union[
    str, os.PathLike[str], bytes, bytearray, memoryview, NDArray[np.uint8], "Image.Image"
]

_CHANNELS: Final = (3, 4)
_PNG_MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_FASTEST_COMPRESSION: Final = 1
_ORIENTATION: Final = 0x0112  # the EXIF tag
_REMEDY: Final = "give a path, bytes, uint8 pixels [H, W, 3] or a Pillow image"


def check_images(images: object) -> None:
    """Raises InvalidInput for a single image; most kinds of single images can
    be iterated over.
    """
    is_single_image = isinstance(images, str | bytes | bytearray | memoryview | os.PathLike)
    is_single_array = isinstance(images, np.ndarray) and images.ndim != 4
    if (
        is_single_image
        or is_single_array
        or not (hasattr(images, "__iter__") or hasattr(images, "__aiter__"))
    ):
        raise InvalidInput(
            "images must be a series of images", remedy="put the one image into a list"
        )


def image_bytes(image: ImageInput, *, max_bytes: int) -> bytes | ImageRejected:
    """Returns the bytes to send, or the error why the image cannot be sent.

    Pixels become PNG, with the EXIF orientation of a Pillow image.
    """
    try:
        data = _to_bytes(image, max_bytes)
    except ImageRejected as rejection:
        return rejection
    if len(data) > max_bytes:
        return _too_large(len(data), max_bytes)
    return data


def _to_bytes(image: Any, max_bytes: int) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        return _read(Path(image), max_bytes)
    from PIL import Image

    if hasattr(image, "detach"):  # a torch tensor
        image = image.detach().cpu().numpy()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or not _is_picture(image.shape):
            raise ImageRejected(
                "unreadable",
                f"an image must be uint8 [H, W, 3], got {image.dtype} {image.shape}",
                remedy=_REMEDY,
            )
        return _png(Image.fromarray(np.ascontiguousarray(image)))
    if isinstance(image, Image.Image):
        return _png(image)
    raise ImageRejected(
        "unreadable",
        f"an image must be a path, bytes or pixels, got {type(image).__name__}",
        remedy=_REMEDY,
    )


def _is_picture(shape: tuple[int, ...]) -> bool:
    return 0 not in shape and (len(shape) == 2 or (len(shape) == 3 and shape[2] in _CHANNELS))


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise _too_large(size, max_bytes)
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ImageRejected("unreadable", f"the file {path} cannot be read") from error


def _png(image: "Image.Image") -> bytes:
    from PIL import Image

    if image.mode not in _PNG_MODES:
        raise ImageRejected(
            "unreadable",
            f"pixels of mode {image.mode} cannot be sent",
            remedy="convert them to RGB",
        )
    buffer = io.BytesIO()
    try:
        image.load()
        exif = Image.Exif()
        exif[_ORIENTATION] = image.getexif().get(_ORIENTATION, 1)
        image.save(buffer, "PNG", compress_level=_FASTEST_COMPRESSION, exif=exif)
    except (
        Exception
    ) as error:  # an image that is read only now may be damaged, which Pillow reports in many ways
        raise ImageRejected("undecodable", "the image is damaged or incomplete") from error
    return buffer.getvalue()


def _too_large(size: int, max_bytes: int) -> ImageRejected:
    return ImageRejected(
        "too-many-bytes", f"{size} bytes, more than the {max_bytes} that the server takes"
    )
