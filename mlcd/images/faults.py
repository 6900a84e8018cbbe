"""Distinguishes errors of the file system from damage inside a file."""

import errno
import os

from mlcd.errors import Unavailable
from mlcd.images.names import printable


def is_fault(error: BaseException | None) -> bool:
    """Tells whether the file system failed or refused access.

    Errors about damage in a file lack an errno, or EINVAL for an impossible offset.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def raise_if_file_system_error(path: str, error: Exception) -> None:
    """Raises Unavailable if the file system caused the error; returns for damage in the file."""
    if is_fault(error):
        raise unavailable(path, error) from error


def unavailable(path: str, error: Exception) -> Unavailable:
    """Returns an error that names the file and the reason."""
    remedy = "fix the cause or omit the file, then run the same command again"
    if isinstance(error, PermissionError):
        remedy = f"let user {os.geteuid()} read it (chmod -R a+rX), or omit it"
    return Unavailable(f"{printable(path)} cannot be read: {reason_of(error)}", remedy=remedy)


def reason_of(error: Exception) -> str:
    """Returns why a file cannot be read, from the error's errno."""
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number else "its file system is unreachable"
