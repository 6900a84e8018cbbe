"""Writes files durably, and translates OS errors into errors that name the remedy."""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mlcd.errors import Conflict, DiskFull, InvalidInput
from mlcd.too_many_files import refuse_too_many_files

# the last alternative is the message of numpy's ndarray.tofile
_NO_SPACE: Final = re.compile(
    r"No space left on device|File too large|\d+ requested and \d+ written"
)


@contextmanager
def translate_os_errors(path: Path, *, remedy: str | None = None) -> Iterator[None]:
    """Turns errors of the file system into errors that name the remedy.

    remedy: replaces the default remedy, which is about the output that the user gave.
    """
    try:
        yield
    except OSError as error:
        refuse_too_many_files(error)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise InvalidInput(
                f"{path} cannot be written: no permission",
                remedy=remedy or "give a writable output",
            ) from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR):
            raise InvalidInput(
                f"{path} cannot be created as a directory", remedy=remedy or "give another output"
            ) from error
        raise


def raise_if_disk_full(error: BaseException, path: Path) -> None:
    """Raises DiskFull for an error that reports no space left, or a limit on file sizes."""
    if _is_disk_full(error):
        raise DiskFull(
            f"the disk is full while writing {path}",
            remedy="free space and run the same command again",
        ) from error


def _is_disk_full(error: BaseException) -> bool:
    """Checks errno, then the message: numpy, pyarrow, safetensors and faiss set no errno."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    return bool(_NO_SPACE.search(str(error)))


@contextmanager
def hold_lock(path: Path, *, mode: int = 0o666) -> Iterator[None]:
    """Holds the lock of the file at `path`, which is created if missing and never removed.

    Waits while another process or thread holds the lock. The operating system
    frees the lock of a dead process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lock_directory(path: Path, kind: int, *, make: bool = True) -> int:
    """Returns a descriptor that holds the lock of the directory at `path`, which is created
    if missing.

    kind: LOCK_SH or LOCK_EX of fcntl. Raises Conflict if another process holds the lock; without
    `make`, FileNotFoundError if the directory is missing.
    """
    while True:
        try:
            if make:
                path.mkdir(exist_ok=True)
        except FileNotFoundError as error:  # a file system such as /proc, or no parent folder
            raise InvalidInput(
                f"{path} cannot be created", remedy="give a writable output"
            ) from error
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise Conflict(
                f"another process is writing {path}", remedy="wait for it or give another output"
            ) from error
        # Another process may have renamed the directory away between open and lock.
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; after the block, syncs it and renames it to `path`.

    A reader finds either the old or the complete new content, even after a power cut. If the block
    fails, nothing changes. For a directory, the block itself must sync the files; a directory can
    replace only an empty one.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        sync_path(temporary)
        temporary.rename(path)
        sync_path(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Returns a path that no other process uses, because a process that was thought dead may still
    write the same file.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_synced(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
