"""The distinction between faults of the file system and damage inside a file."""

import errno
import os

from mlcd.errors import Unavailable
from mlcd.images.names import printable


def is_fault(error: BaseException | None) -> bool:
    """Tells whether the file system failed or refused.

    Errors about damage in a file carry no number, or that of an impossible offset.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def refuse_fault(path: str, error: Exception) -> None:
    if is_fault(error):
        raise unavailable(path, error) from error


def unavailable(path: str, error: Exception) -> Unavailable:
    remedy = "mend that, or leave it out, and run the same again"
    if isinstance(error, PermissionError):
        remedy = f"let user {os.geteuid()} read it (chmod -R a+rX), or leave it out"
    return Unavailable(f"{printable(path)} cannot be read: {reason_of(error)}", remedy=remedy)


def reason_of(error: Exception) -> str:
    """Returns why a file cannot be read, by the number of the error."""
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number else "its file system does not answer"
