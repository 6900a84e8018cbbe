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
    raise_if_disk_full,
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
_EXISTS_ERRORS: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
_PERMISSION_ERRORS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class NotRemoved(Unavailable):
    """The file system does not let this process remove a directory."""

    name = "not-removed"


def owner_of(path: Path) -> Any:
    """Returns the owner written in `OWNER`, or None if the file is missing."""
    try:
        return json.loads((path / OWNER).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


def owner_of_draft(draft: Draft) -> Any:
    """Returns the owner of a draft, or None if it lacks one."""
    owner = draft.note(OWNER)
    return None if owner is None else json.loads(owner)


def write_owner(path: Path, owner: str) -> None:
    """Writes the owner into a directory that no other process sees yet."""
    (path / OWNER).write_text(json.dumps(owner))
    sync_path(path / OWNER)
    sync_path(path)


def claim(path: Path, owner: str) -> None:
    """Creates the directory at `path` unless this owner has it; an owner's processes share it.

    Raises Conflict if something else is at `path`.
    """
    if owner_of(path) == owner:
        return
    with translate_os_errors(path):
        try:
            with replacing(path) as draft:
                draft.mkdir()
                write_owner(draft, owner)
        except OSError as error:
            raise_if_disk_full(error, path)
            if error.errno not in _EXISTS_ERRORS:
                raise
            if owner_of(path) != owner:
                raise Conflict(
                    f"{path} contains something else", remedy="remove it or give another output"
                ) from error


def take_over(draft: Draft) -> None:
    """Transfers a draft from its owner to the process that holds its lock: the owner no longer
    continues or removes the draft.
    """
    draft.remove_note(OWNER)


def discard(path: Path, owner: str) -> None:
    """Removes the directory if it belongs to this owner, and the remains of an interrupted removal.

    Raises Conflict if another process works in the directory, NotRemoved if a file remains.
    """
    _finish_removal(path)
    try:
        if owner_of(path) == owner:
            _hide(path, owner)
    except OSError as error:
        raise _not_removed(path, error) from error
    _finish_removal(path)


def discard_uploads(out: Path, owner: str) -> None:
    """Removes this owner's unfinished output from the URL of `out`, if `out` has a URL."""
    uploads = uploads_of(out, draft_path(out), shared=True)
    note = uploads.note(OWNER)
    if note is not None and json.loads(note) == owner:
        uploads.discard()


def give_up(path: Path, owner: str) -> None:
    """Calls `discard`, but ignores a failed removal, because the caller reports a worse error."""
    with suppress(Conflict, NotRemoved):
        discard(path, owner)


def _hide(path: Path, owner: str) -> None:
    """Renames the directory before its files are removed, so that readers lose it at once."""
    try:
        lock = lock_directory(path, fcntl.LOCK_EX, make=False)
    except FileNotFoundError:  # another process was faster
        return
    try:
        if owner_of(path) == owner:
            path.rename(_hidden_path(path))
    finally:
        os.close(lock)


def _finish_removal(path: Path) -> None:
    """Completes a removal, possibly together with other processes."""
    hidden = _hidden_path(path)
    shutil.rmtree(hidden, ignore_errors=True)  # removes what it can
    while os.path.lexists(hidden):
        try:
            shutil.rmtree(hidden)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _not_removed(hidden, error) from error


def _not_removed(path: Path, error: OSError) -> NotRemoved:
    reason = "no permission" if error.errno in _PERMISSION_ERRORS else "the file system refuses"
    return NotRemoved(
        f"{path} cannot be removed: {reason}",
        remedy="let the user who made it write there, or remove it by hand",
    )


def _hidden_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{_DISCARDED}")
