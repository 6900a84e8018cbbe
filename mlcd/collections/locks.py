"""The lock of a collection: exclusive for a writing process, shared for reading processes.

STATE/NAME/lock    locked (flock) while a process has the collection open
"""

import fcntl
import os
from pathlib import Path
from typing import Final

from mlcd.errors import ArtifactInvalid, Conflict, NotFound
from mlcd.too_many_files import refuse_too_many_files

LOCK: Final = "lock"


class CollectionLock:
    """A held lock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        os.close(self._descriptor)


def lock_collection(path: Path, *, writable: bool) -> CollectionLock:
    """Locks the collection at `path`: exclusively if writable, otherwise shared.

    A missing lock file is never created again: a process may still hold a lock on the removed file.
    Raises NotFound without a collection at `path`, ArtifactInvalid if its lock file is missing,
    Conflict if another process holds the lock.
    """
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        refuse_too_many_files(error)
        if any(path.glob("*.sqlite")):
            raise _describe_lock_error(path, error) from error
        raise NotFound(f"no collection at {path}", remedy="create it first") from error
    lock = CollectionLock(descriptor)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if writable else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.release()
        raise Conflict(
            f"another process has the collection {path.name} open",
            remedy="stop that process, or send it the request",
        ) from error
    except BaseException:
        lock.release()
        raise
    return lock


def _describe_lock_error(path: Path, error: OSError) -> ArtifactInvalid:
    if isinstance(error, FileNotFoundError):
        remedy = "stop all processes that have the collection open, then create an empty file there"
        return ArtifactInvalid(f"{path / LOCK} is missing", remedy=remedy)
    return ArtifactInvalid(
        f"{path / LOCK} cannot be opened: {error.strerror}",
        remedy="give this user write permission",
    )
