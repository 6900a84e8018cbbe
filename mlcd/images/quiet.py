"""Silences decoders: libtiff (standard error) and Pillow (log) would print file contents."""

import ctypes
import logging
from typing import Final

from PIL import _imaging

_LIBTIFF: Final = ("TIFFSetErrorHandler", "TIFFSetWarningHandler")


def silence_decoders() -> None:
    """Suppresses the output of libtiff and Pillow in this process; ImageRejected says what is wrong
    with an image.
    """
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    libraries = ctypes.CDLL(_imaging.__file__)  # includes all linked libraries
    for name in _LIBTIFF:
        if hasattr(libraries, name):
            getattr(libraries, name)(None)
