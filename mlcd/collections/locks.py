"""The locks that give a collection to one process that writes, or to many that read.

    STATE/NAME/lock    held by the process that opens the collection, for as long as it is open
    STATE/.locks       one byte for each collection, held by a store that has many of them open

A lock on a file costs a descriptor, and a store that kept one for each collection would run out of
them. So it takes the lock of a collection, then its byte, and releases the lock. Every process
takes the lock first and then checks the byte, so no two have the same collection. The number of a
byte is the inode of the lock, which stays the same when a collection is renamed.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from mlcd.errors import ArtifactInvalid, Conflict, NotFound
from mlcd.too_many_files import refuse_too_many_files

LOCK: Final = "lock"
BYTES: Final = ".locks"
_FLOCK: Final = "hhqqi4x"  # struct flock of 64-bit Linux
_NUM_BYTES: Final = 2**62  # offsets of files are signed
# these locks belong to an open file, not to a process; Linux has them
_OPEN_FILE_LOCKS: Final = hasattr(fcntl, "F_OFD_SETLK")
# errors of a folder that is missing or cannot be written, and of file systems without such locks
_CANNOT: Final = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.EINVAL,
        errno.ENOLCK,
        errno.EOPNOTSUPP,
    }
)


class Lock(Protocol):
    """The right to a collection, until it is released."""

    def release(self) -> None: ...


class DescriptorLock:
    """The lock of a collection, held by a descriptor of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def number(self) -> int:
        """Returns the offset of its byte among those of a store."""
        return os.fstat(self._descriptor).st_ino % _NUM_BYTES

    def release(self) -> None:
        os.close(self._descriptor)


class _Byte:
    """The byte of a collection, held by the descriptor that a store has for all."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release


class StoreLocks:
    """The bytes that one store holds of the collections in one folder, for one thread at a time."""

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self._held: set[int] = set()
        self._folder = folder.resolve()
        self._descriptor: int | None = None
        if _OPEN_FILE_LOCKS:
            try:
                flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
                self._descriptor = os.open(folder / BYTES, flags, 0o666)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def lock(self, path: Path, *, writable: bool) -> Lock:
        """Locks the collection at `path`, by its byte where possible; raises what `lock_collection`
        raises.
        """
        held = lock_collection(path, writable=writable)
        try:
            byte = self._hold(path, held.number, writable=writable)
        except BaseException:
            held.release()
            raise
        if byte is None:
            return held
        held.release()
        return byte

    def _hold(self, path: Path, number: int, *, writable: bool) -> _Byte | None:
        """Returns None where a byte does not suffice, because other processes would look for it in
        another folder.
        """
        if (
            self._descriptor is None
            or path.resolve().parent != self._folder
            or number in self._held
        ):
            return None
        try:
            kind = fcntl.F_WRLCK if writable else fcntl.F_RDLCK
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _asked(kind, number))
        except BlockingIOError as error:
            raise _taken(path) from error
        except OSError as error:
            if error.errno in _CANNOT:
                return None
            raise
        self._held.add(number)
        return _Byte(lambda: self._release(number))

    def _release(self, number: int) -> None:
        self._held.discard(number)
        if self._descriptor is not None:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _asked(fcntl.F_UNLCK, number))


def lock_collection(path: Path, *, writable: bool) -> DescriptorLock:
    """Locks the collection at `path`, for one process that writes or for many that read.

    A missing lock is never made again: a process may hold the one that was removed. Raises NotFound
    where there is no collection, ArtifactInvalid where it lacks its lock, Conflict where another
    process has it.
    """
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        refuse_too_many_files(error)
        if any(path.glob("*.sqlite")):
            raise _cannot_be_locked(path, error) from error
        raise NotFound(f"there is no collection at {path}", remedy="create it first") from error
    held = DescriptorLock(descriptor)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if writable else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        is_taken = _is_held_by_a_store(path, held.number, writable=writable)
    except BlockingIOError:
        is_taken = True
    except BaseException:
        held.release()
        raise
    if is_taken:
        held.release()
        raise _taken(path)
    return held


def _is_held_by_a_store(path: Path, number: int, *, writable: bool) -> bool:
    """Tells whether a store holds the byte; raises Conflict where that cannot be found out."""
    if not _OPEN_FILE_LOCKS:
        return False
    try:
        descriptor = os.open(path.resolve().parent / BYTES, os.O_RDONLY)
    except FileNotFoundError:  # no store was ever opened in this folder
        return False
    except PermissionError as error:
        raise Conflict(
            f"whether a server has the collection {path.name} open cannot be told",
            remedy=f"let this user read {BYTES} beside it",
        ) from error
    try:
        wanted = _asked(fcntl.F_WRLCK if writable else fcntl.F_RDLCK, number)
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted)
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)
    finally:
        os.close(descriptor)


def _asked(kind: int, number: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, number, 1, 0)


def _cannot_be_locked(path: Path, error: OSError) -> ArtifactInvalid:
    if isinstance(error, FileNotFoundError):
        remedy = "end every process that has the collection open, then make an empty file there"
        return ArtifactInvalid(f"{path / LOCK} is missing", remedy=remedy)
    return ArtifactInvalid(
        f"{path / LOCK} cannot be opened: {error.strerror}",
        remedy="let this user write it",
    )


def _taken(path: Path) -> Conflict:
    return Conflict(
        f"another process has the collection {path.name} open", remedy="end it, or ask it"
    )
