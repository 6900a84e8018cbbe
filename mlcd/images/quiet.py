"""What decoders say by themselves: libtiff to the standard error, Pillow to its log, both with what
a file holds.
"""

import ctypes
import logging
from typing import Final

from PIL import _imaging

_LIBTIFF: Final = ("TIFFSetErrorHandler", "TIFFSetWarningHandler")


def silence_decoders() -> None:
    """Nothing of theirs is written, as long as the process lives; ImageRejected says what is wrong
    with an image.
    """
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    libraries = ctypes.CDLL(_imaging.__file__)  # and all that it is linked with
    for name in _LIBTIFF:
        if hasattr(libraries, name):
            getattr(libraries, name)(None)
