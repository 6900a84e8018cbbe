"""The lock that gives a collection to one process that writes, or to many that read.

STATE/NAME/lock    held by the process that opens the collection, for as long as it is open
"""

import fcntl
import os
from pathlib import Path
from typing import Final

from mlcd.errors import ArtifactInvalid, Conflict, NotFound
from mlcd.too_many_files import refuse_too_many_files

LOCK: Final = "lock"


class CollectionLock:
    """The right to a collection, until it is released."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        os.close(self._descriptor)


def lock_collection(path: Path, *, writable: bool) -> CollectionLock:
    """Locks the collection at `path`, for one process that writes or for many that read.

    A missing lock is never made again: a process may hold the one that was removed. Raises NotFound
    where none is there, ArtifactInvalid where it lacks its lock, Conflict where another
    process has it.
    """
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        refuse_too_many_files(error)
        if any(path.glob("*.sqlite")):
            raise _cannot_be_locked(path, error) from error
        raise NotFound(f"no collection at {path}", remedy="create it first") from error
    lock = CollectionLock(descriptor)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if writable else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.release()
        raise Conflict(
            f"another process has the collection {path.name} open", remedy="end it, or ask it"
        ) from error
    except BaseException:
        lock.release()
        raise
    return lock


def _cannot_be_locked(path: Path, error: OSError) -> ArtifactInvalid:
    if isinstance(error, FileNotFoundError):
        remedy = "end every process that has the collection open, then make an empty file there"
        return ArtifactInvalid(f"{path / LOCK} is missing", remedy=remedy)
    return ArtifactInvalid(
        f"{path / LOCK} cannot be opened: {error.strerror}",
        remedy="let this user write it",
    )
