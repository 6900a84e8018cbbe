"""The error that no descriptor is free, which libraries report in many ways."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mlcd.errors import TooManyOpenFiles

# faiss reports these errors only in the message
_TOO_MANY_FILES: Final = re.compile(r"Too many open files")
# fewer free descriptors count as none, because other threads open and close files meanwhile
_SPARE_FILES: Final = 8


def is_too_many_files(error: BaseException) -> bool:
    """Tells whether an error, or one that led to it, reports that no descriptor is free."""
    return any(map(_reports_too_many_files, _iterate_causes(error)))


def _reports_too_many_files(error: BaseException) -> bool:
    is_numbered = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return is_numbered or bool(_TOO_MANY_FILES.search(str(error)))


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for cause in (*group, error.__cause__ or error.__context__):
        if cause is not None:
            yield from _iterate_causes(cause)


def refuse_too_many_files(error: BaseException) -> None:
    """Raises TooManyOpenFiles for an error that reports that no descriptor is free."""
    if is_too_many_files(error):
        raise too_many_files() from error


@contextmanager
def explain_open_files() -> Iterator[None]:
    """Turns "too many open files" into an error that names the remedy."""
    try:
        yield
    except OSError as error:
        refuse_too_many_files(error)
        raise


def too_many_files() -> TooManyOpenFiles:
    return TooManyOpenFiles(
        "the process has too many open files",
        remedy="try again later; where it stays so, raise the limit on open files (ulimit -n)",
    )


def lacks_open_files() -> bool:
    """Tells whether fewer than 8 descriptors are free.

    For libraries that do not report why they could not open a file.
    """
    descriptors: list[int] = []
    try:
        for _ in range(_SPARE_FILES):
            # not a comprehension: those before a failure must be closed
            descriptors.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return False
