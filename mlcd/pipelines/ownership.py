"""The ownership of a directory of unfinished work: only its owner continues or removes it."""

import errno
import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mlcd.artifacts.disk import (
    lock_directory,
    refuse_full_disk,
    replacing,
    sync_path,
    translate_os_errors,
)
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import draft_path
from mlcd.artifacts.uploads import uploads_of
from mlcd.errors import Conflict, Unavailable

OWNER: Final = ".owner.json"
_DISCARDED: Final = ".discarded"
_TAKEN: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class NotRemoved(Unavailable):
    """A directory stays because the file system does not let this process remove it."""

    name = "not-removed"


def owner_of(path: Path) -> Any:
    """Returns the owner written in `OWNER`, None where there is none."""
    try:
        return json.loads((path / OWNER).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


def owner_of_draft(draft: Draft) -> Any:
    """Returns the owner of a draft, None where there is none."""
    owner = draft.note(OWNER)
    return None if owner is None else json.loads(owner)


def write_owner(path: Path, owner: str) -> None:
    """Writes the owner into a directory that no other process sees yet."""
    (path / OWNER).write_text(json.dumps(owner))
    sync_path(path / OWNER)
    sync_path(path)


def claim(path: Path, owner: str) -> None:
    """Makes or enters a directory of this owner at `path`, which processes of one owner share.

    Raises Conflict for another owner's.
    """
    if owner_of(path) == owner:
        return
    with translate_os_errors(path):
        try:
            with replacing(path) as draft:
                draft.mkdir()
                write_owner(draft, owner)
        except OSError as error:
            refuse_full_disk(error, path)
            if error.errno not in _TAKEN:
                raise
            if owner_of(path) != owner:
                raise Conflict(
                    f"{path} holds something else", remedy="remove it or give another output"
                ) from error


def take_over(draft: Draft) -> None:
    """Gives an owner's work to the process that holds its lock: the owner neither continues nor
    removes it.
    """
    draft.remove_note(OWNER)


def discard(path: Path, owner: str) -> None:
    """Removes what belongs to this owner, and the remains of an interrupted removal.

    Raises Conflict where another process works in it, NotRemoved naming what stays.
    """
    _finish_removal(path)
    try:
        if owner_of(path) == owner:
            _hide(path, owner)
    except OSError as error:
        raise _not_removed(path, error) from error
    _finish_removal(path)


def discard_uploads(out: Path, owner: str) -> None:
    """Removes the unfinished output of this owner from the URL of `out`, where it has one."""
    uploads = uploads_of(out, draft_path(out), shared=True)
    note = uploads.note(OWNER)
    if note is not None and json.loads(note) == owner:
        uploads.discard()


def give_up(path: Path, owner: str) -> None:
    """Calls `discard`, but ignores that the directory stays, because the caller reports a worse
    error.
    """
    with suppress(Conflict, NotRemoved):
        discard(path, owner)


def _hide(path: Path, owner: str) -> None:
    """Renames the directory, so that it is gone at once for all readers before its files are
    removed.
    """
    try:
        lock = lock_directory(path, fcntl.LOCK_EX, make=False)
    except FileNotFoundError:  # another process was faster
        return
    try:
        if owner_of(path) == owner:
            path.rename(_leaving(path))
    finally:
        os.close(lock)


def _finish_removal(path: Path) -> None:
    """Completes a removal, possibly together with other processes."""
    leaving = _leaving(path)
    shutil.rmtree(leaving, ignore_errors=True)  # removes all that can be removed
    while os.path.lexists(leaving):
        try:
            shutil.rmtree(leaving)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _not_removed(leaving, error) from error


def _not_removed(path: Path, error: OSError) -> NotRemoved:
    why = "no permission" if error.errno in _FORBIDDEN else "the file system refuses"
    return NotRemoved(
        f"{path} cannot be removed: {why}",
        remedy="let the user who made it write there, or remove it by hand",
    )


def _leaving(path: Path) -> Path:
    return path.with_name(f".{path.name}{_DISCARDED}")
