"""Reads HEIC and HEIF, which Pillow does not support, with libheif."""

from typing import Final, cast

from PIL import Image

from mlcd.errors import ImageRejected
from mlcd.images.bounded import BoundedFile

HEIC: Final = "HEIC"
_NOT_INSTALLED: Final = "HEIC needs the extra heif of mlcd"
# No install command, because it could show a path of the server's machine to clients.
_REMEDY: Final = "install the extra heif where mlcd runs, or give JPEG"
_MAX_BRANDS_BYTES: Final = 256
_HEVC: Final = frozenset(
    [b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"heif"]
)
_ANY_CODEC: Final = frozenset([b"mif1", b"mif2", b"msf1", b"miaf"])
_AVIF: Final = frozenset([b"avif", b"avis"])


def is_heic(data: bytes) -> bool:
    """Tells from the brands of a file whether it is HEIC or HEIF, and not AVIF."""
    if data[4:8] != b"ftyp":
        return False
    major = data[8:12]
    end = min(int.from_bytes(data[:4], "big"), _MAX_BRANDS_BYTES)
    compatible = {data[at : at + 4] for at in range(16, end, 4)}
    return major in _HEVC or (major in _ANY_CODEC and not compatible & _AVIF)


def has_heic() -> bool:
    """Tells whether the decoder is installed."""
    try:
        import pi_heif  # noqa: F401
    except ImportError:
        return False
    return True


def open_heic(file: BoundedFile) -> Image.Image:
    """Opens an image, reading only its header; loading it applies the format's own rotation.

    Does not register the format in Pillow. Raises ImageRejected if the decoder is not installed.
    """
    if not has_heic():
        raise ImageRejected("unsupported-format", _NOT_INSTALLED, remedy=_REMEDY)
    from pi_heif import HeifImageFile

    return cast("Image.Image", HeifImageFile(file))
