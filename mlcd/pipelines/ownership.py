"""Whose unfinished work a directory holds: nobody goes on with another's, and nobody removes it."""

import errno
import json
import secrets
import shutil
from pathlib import Path
from typing import Any, Final

from mlcd.disk import refuse_full_disk, sync_path, translated_os_errors
from mlcd.errors import Conflict

OWNER: Final = ".owner.json"
_DISCARDED: Final = ".discarded"
_TAKEN: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def owner_of(path: Path) -> Any:
    """What was written there as `OWNER`, None where nothing was."""
    try:
        return json.loads((path / OWNER).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_owner(path: Path, owner: str) -> None:
    """Into a directory that nobody sees yet."""
    (path / OWNER).write_text(json.dumps(owner))
    sync_path(path / OWNER)
    sync_path(path)


def claim(path: Path, owner: str) -> None:
    """A directory of this owner's at `path`, whoever else of the same is at it. Raises Conflict for another's."""
    if owner_of(path) == owner:
        return
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with translated_os_errors(path):
        try:
            made.mkdir()
            write_owner(made, owner)
            made.rename(path)
        except OSError as error:
            refuse_full_disk(error, path)
            if error.errno not in _TAKEN:
                raise
            if owner_of(path) != owner:
                raise Conflict(f"{path} holds something else", remedy="remove it or give another output") from error
        finally:
            shutil.rmtree(made, ignore_errors=True)


def discard(path: Path, owner: str) -> None:
    """Remove what is this owner's, and what is left of a removal that was interrupted."""
    _finish_removal(path)
    if owner_of(path) == owner:
        path.rename(_leaving(path))  # at once for everybody who looks, then file by file
        _finish_removal(path)


def _finish_removal(path: Path) -> None:
    shutil.rmtree(_leaving(path), ignore_errors=True)


def _leaving(path: Path) -> Path:
    return path.with_name(f".{path.name}{_DISCARDED}")
