"""What the file system fails or refuses to give is told from what is wrong in a file."""

import errno
import os

from mlcd.errors import Unavailable
from mlcd.images.names import printable


def is_fault(error: BaseException | None) -> bool:
    """Whether the file system failed or refused.

    What is wrong in a file is said without a number, or with that of a place in it that cannot be.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def refuse_fault(path: str, error: Exception) -> None:
    if is_fault(error):
        raise unavailable(path, error) from error


def unavailable(path: str, error: Exception) -> Unavailable:
    number = getattr(error, "errno", None)
    reason = os.strerror(number).lower() if number else "its file system does not answer"
    return Unavailable(
        f"{printable(path)} cannot be read: {reason}",
        remedy="mend that, or leave it out, and run the same again",
    )
