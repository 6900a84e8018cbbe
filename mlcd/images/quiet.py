"""The output of decoders: libtiff writes to the standard error, Pillow to its log, both with
contents of files.
"""

import ctypes
import logging
from typing import Final

from PIL import _imaging

_LIBTIFF: Final = ("TIFFSetErrorHandler", "TIFFSetWarningHandler")


def silence_decoders() -> None:
    """Suppresses all such output for the life of the process; ImageRejected states what is wrong
    with an image.
    """
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    libraries = ctypes.CDLL(_imaging.__file__)  # includes all that it is linked with
    for name in _LIBTIFF:
        if hasattr(libraries, name):
            getattr(libraries, name)(None)
