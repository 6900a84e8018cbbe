"""What is written is on the disk, and what the file system refuses is an error that names the remedy."""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mlcd.errors import DiskFull, InvalidInput

# The last is numpy's ndarray.tofile.
_NO_SPACE: Final = re.compile(r"No space left on device|File too large|\d+ requested and \d+ written")


@contextmanager
def translated_os_errors(place: Path) -> Iterator[None]:
    """Turn what the file system refuses into an error that names the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise InvalidInput(f"{place} cannot be written: no permission", remedy="give a writable output") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR):
            raise InvalidInput(f"{place} cannot be made a directory", remedy="give another output") from error
        raise


def refuse_full_disk(error: BaseException, place: Path) -> None:
    """Raise DiskFull from an error that says that there is no space, or no more than a limit on file sizes."""
    if _is_disk_full(error):
        raise DiskFull(
            f"the disk is full while writing {place}", remedy="free space and run the same command again"
        ) from error


def _is_disk_full(error: BaseException) -> bool:
    """By number where there is one; numpy, pyarrow, safetensors and faiss tell it in words only."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    return bool(_NO_SPACE.search(str(error)))


def temporary_path(path: Path) -> Path:
    """Nobody else's: a process that was thought dead may still be writing the same file."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_synced(path: Path, content: bytes) -> None:
    temporary = temporary_path(path)
    temporary.write_bytes(content)
    sync_path(temporary)
    temporary.rename(path)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
