"""Builds artifacts in draft directories, which one rename publishes.

A draft survives a crash: the next attempt at the same request continues with its finished files.
"""

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from mlcd.artifacts.copies import is_finished, make_room
from mlcd.artifacts.disk import (
    hold_lock,
    lock_directory,
    raise_if_disk_full,
    sync_path,
    temporary_path,
    translate_os_errors,
    write_synced,
)
from mlcd.artifacts.listed_files import inventory
from mlcd.artifacts.manifest import (
    GROWN,
    MANIFEST,
    SCHEMA,
    Artifact,
    FileEntry,
    Request,
    canonical_json,
    draft_path,
    measure,
    open_artifact,
    seal_manifest,
)
from mlcd.artifacts.uploads import REQUEST, Nowhere, Uploads, uploads_of
from mlcd.errors import ConfigInvalid, Conflict, InvalidInput, MlcdError
from mlcd.types import Fingerprint
from mlcd.version import __version__

_TEMPORARY: Final = ".*.tmp"
_BATCH_LOCK: Final = ".together"


def find_published(out: Path, request: Request) -> Artifact | None:
    """Returns the finished artifact of exactly this request, or None if nothing is at `out`.

    Removes working notes of a writer that was killed right after the rename. Raises Conflict if
    anything else is at `out`.
    """
    if out.name in ("", ".."):
        raise InvalidInput(
            f"the output must be a directory with a name, got {str(out)!r}",
            remedy="give a new directory",
        )
    is_artifact = is_finished(out)
    if not os.path.lexists(out):
        return None
    if not is_artifact:
        raise Conflict(
            f"the output must be new or an artifact, got {out}",
            remedy="give another output directory",
        )
    artifact = open_artifact(out, verify_files=False)
    identity = artifact.request().identity()
    # an artifact that grew by additions equals one that was made at once
    identity["config"].pop(GROWN, None)
    # the request for a new model has no fingerprint, but its result has one
    if request.fingerprint is None:
        identity["fingerprint"] = None
    requested = request.identity()
    if identity != requested:
        remedy = "remove it or give another output directory"
        if (
            artifact.kind in ("embeddings", "labels")
            and identity | {"parents": requested["parents"]} == requested
        ):
            remedy += "; --append adds what is new in the same input"
        raise Conflict(
            f"{out} holds {artifact.kind} made from other input or settings", remedy=remedy
        )
    if (out / REQUEST).is_file():
        _clear_notes(out)
    uploads_of(out, draft_path(out), shared=False).clear_notes()
    return artifact


def change_begun(out: Path, config: Mapping[str, Any]) -> None:
    """Replaces the config of the unfinished work at `out`, for its next attempt.

    The caller must know that the finished files stay valid. Raises Conflict if a process is
    working on it.
    """
    path = draft_path(out)
    descriptor = lock_directory(path, fcntl.LOCK_EX, make=False)
    try:
        identity = json.loads((path / REQUEST).read_text())
        changed = canonical_json({**identity, "config": dict(config)})
        write_synced(path / REQUEST, changed.encode())
    finally:
        os.close(descriptor)


class Draft:
    """A directory under construction: exclusive, resumable, invisible to readers until `publish`.

    Use it as a context manager. Leaving it without `publish` keeps the finished files for the next
    attempt, with one exception: if the attempt that created the draft fails because of its input or
    settings, no attempt can finish the draft, so it is removed, unless `keep` was called. A draft
    of another request raises Conflict.

    fresh: discard the results of earlier attempts. shared: several processes may enter the draft,
    all with shared=True. If several of them write a file of one name, its bytes must be equal, or
    it must be written in `all_or_none` with the files that belong to it. A process that is too
    late, after the draft was published or removed, gets a Conflict. Hidden files are working notes,
    which `publish` removes.

    For an output at a URL, each finished file is also uploaded immediately, unless upload=False.
    """

    def __init__(
        self,
        out: Path,
        request: Request,
        *,
        fresh: bool = False,
        shared: bool = False,
        upload: bool = True,
    ) -> None:
        self.out = out
        self._fresh, self._shared, self._may_remove = fresh, shared, False
        self.request = request
        self.path = draft_path(out)
        self._uploads: Nowhere | Uploads = (
            uploads_of(out, self.path, shared=shared) if upload else Nowhere(self.path)
        )
        self._descriptor: int | None = None
        self._entries: dict[str, FileEntry] = {}
        self._held_back: list[tuple[Path, str]] | None = None

    def __enter__(self) -> Self:
        with translate_os_errors(self.out):
            make_room(self.out)
            # The parent of a shared draft must exist: if it is missing, its disk may be unmounted.
            if not self._shared:
                self.out.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = lock_directory(
                self.path, fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX
            )
            try:
                self._uploads.begin(self.request.canonical(), fresh=self._fresh)
                self._claim()
                self._may_remove |= self._uploads.began and not self._shared
            except BaseException:
                self._unlock()
                raise
        return self

    def _claim(self) -> None:
        """Continues the draft of the same request, or starts a new one."""
        identity = self.request.canonical()
        marker = self.path / REQUEST
        if marker.is_file() and marker.read_text() == identity and not self._fresh:
            for leftover in [] if self._shared else list(self.path.rglob(_TEMPORARY)):
                _remove(leftover)
            return
        holds_work = any(
            entry.name != REQUEST and not entry.match(_TEMPORARY) for entry in self.path.iterdir()
        )
        if holds_work and not self._fresh:
            raise Conflict(
                f"{self.path} contains unfinished work on other input or settings",
                remedy="remove it or give another output directory",
            )
        for entry in [] if self._shared else list(self.path.iterdir()):
            _remove(entry)
        write_synced(marker, identity.encode())
        self._may_remove = not self._shared

    def read_request(self) -> dict[str, Any] | None:
        """Returns the identity of the unfinished request in the draft; None without one."""
        note = self.note(REQUEST)
        identity: dict[str, Any] | None = None if note is None else json.loads(note)
        return identity

    def note(self, name: str) -> str | None:
        """Returns a working note, for an output at a URL the store's copy; None if missing."""
        return self._uploads.note(name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        at_fault = isinstance(error, InvalidInput | ConfigInvalid) and not isinstance(
            error.__cause__, OSError
        )
        if at_fault and self._may_remove:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(MlcdError):  # the error of the block says more
                self._uploads.discard()
        self._unlock()
        if error is not None:
            raise_if_disk_full(error, self.out)

    def keep(self) -> None:
        """Keeps all files from now on, even if the attempt fails because of its settings."""
        self._may_remove = False

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def has(self, name: str) -> bool:
        """Tells whether any attempt on any machine finished the file; fetches it if necessary."""
        return (self.path / name).is_file() or self._uploads.fetch(name)

    def remove_note(self, name: str) -> None:
        """Removes a working note, for an output at a URL also in the store."""
        self._uploads.remove_note(name)

    def file(self, name: str) -> Path:
        """Returns the path of a finished file; fetches it if another machine finished it."""
        self.has(name)
        return self.path / name

    def fetch_all(self) -> None:
        """Fetches all files that other machines have finished into the draft."""
        self._uploads.fetch_all()

    @contextmanager
    def write(self, name: str) -> Iterator[Path]:
        """Yields a temporary path to write; on success syncs the file to disk and renames it to
        `name`.
        """
        final = self.path / name
        temporary = temporary_path(final)
        with translate_os_errors(self.out):
            self._check_in_use()
            final.parent.mkdir(parents=True, exist_ok=True)
            is_held_back = False
            try:
                yield temporary
                self._entries[name] = measure(temporary)
                sync_path(temporary)
                if is_held_back := self._held_back is not None:
                    self._held_back.append((temporary, name))
                else:
                    temporary.rename(final)
                    self._uploads.put(name)
            except FileNotFoundError:
                self._check_in_use()
                raise
            finally:
                if not is_held_back:
                    temporary.unlink(missing_ok=True)

    @contextmanager
    def all_or_none(self, last: str) -> Iterator[None]:
        """Holds back the files that the block writes until its end, then renames all of them,
        `last` at the end.

        If `last` exists by then, discards all of them. So files that belong together come from one
        process, even if a process that seemed dead continues later.
        """
        held_back = self._held_back = []
        try:
            yield
            self._held_back = None
            self._check_in_use()
            with translate_os_errors(self.out), hold_lock(self.path / _BATCH_LOCK):
                self._rename_all(held_back, last)
        finally:
            self._held_back = None
            for temporary, _ in held_back:
                temporary.unlink(missing_ok=True)

    def _rename_all(self, held_back: list[tuple[Path, str]], last: str) -> None:
        assert held_back[-1][1] == last
        exists = self.has(last)
        for temporary, name in held_back:
            if exists:
                del self._entries[name]
            else:
                temporary.rename(self.path / name)
                self._uploads.put(name)

    def _check_in_use(self) -> None:
        """Raises Conflict if the directory of a shared draft has moved from its path."""
        if not self._shared or self._descriptor is None:
            return
        try:
            if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                return
        except FileNotFoundError:
            pass
        raise Conflict(
            f"{self.path} was published or removed meanwhile",
            remedy="check whether the output exists",
        )

    def adopt(self, name: str, child: Path) -> None:
        """Copies the artifact at `child` to the sub-directory `name`, atomically."""
        final, temporary = self.path / name, self.path / f".{name}.tmp"
        if not final.is_dir():
            shutil.copytree(child, temporary)
            for path in temporary.rglob("*"):
                sync_path(path)
            temporary.rename(final)
        open_artifact(final)

    def write_json(self, name: str, value: object) -> None:
        with self.write(name) as path:
            path.write_text(
                json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
                encoding="utf-8",
            )

    def publish(
        self,
        *,
        fingerprint: Fingerprint | None = None,
        summary: Mapping[str, Any] | None = None,
        logs: tuple[str, ...] = (),
    ) -> Artifact:
        """Writes the manifest of all files in the draft and renames the draft to its final path.

        fingerprint: fingerprint of a new model; None takes the request's. logs: names of files that
        do not count for the artifact's digest.
        """
        with translate_os_errors(self.out):
            files, children = inventory(self.path, self._entries)
            log_entries = {name: files.pop(name) for name in logs if name in files}
            manifest = {
                "schema": SCHEMA,
                "kind": self.request.kind,
                "config": dict(self.request.config),
                "parents": [asdict(parent) for parent in self.request.parents],
                "fingerprint": fingerprint or self.request.fingerprint,
                "files": {name: asdict(entry) for name, entry in files.items()},
                "children": children,
                "logs": {name: asdict(entry) for name, entry in log_entries.items()},
                "summary": dict(summary or {}),
                "code_version": __version__,
                "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            write_synced(self.path / MANIFEST, seal_manifest(manifest))
            self._make_readable([*files, *log_entries])
            sync_path(self.path)
            try:
                self._check_in_use()
                self._uploads.publish()
                self.path.rename(self.out)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise Conflict(
                        f"{self.out} appeared meanwhile", remedy="give another output directory"
                    ) from error
                raise
            sync_path(self.out.parent)
            _clear_notes(self.out)
        return open_artifact(self.out, verify_files=False)

    def hand_over(self) -> None:
        """Renames the draft to its final path without a manifest or a change of modes, because its
        files belong to the user. Raises Conflict if the path exists.
        """
        with translate_os_errors(self.out):
            if os.path.lexists(self.out):
                raise Conflict(f"{self.out} appeared meanwhile", remedy="give another directory")
            self.path.rename(self.out)
            sync_path(self.out.parent)
            _clear_notes(self.out)

    def _make_readable(self, names: list[str]) -> None:
        """Gives all files the mode of the manifest, because safetensors makes its files readable
        only by their owner.
        """
        mode = stat.S_IMODE((self.path / MANIFEST).stat().st_mode)
        for name in names:
            path = self.path / name
            if stat.S_IMODE(path.stat().st_mode) != mode:  # only its owner may change the mode
                path.chmod(mode)


def _clear_notes(out: Path) -> None:
    """Deletes the working notes, REQUEST last, because it marks that notes may be left.

    Stops at an error: another process may be deleting the same notes.
    """
    with suppress(OSError):
        for entry in sorted(out.glob(".*"), key=lambda entry: entry.name == REQUEST):
            _remove(entry)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
