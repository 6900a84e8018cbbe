"""Directories being built, which become artifacts by one rename.

A draft survives a crash: the same request finds the finished files again and continues.
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
    refuse_full_disk,
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
_TOGETHER: Final = ".together"


def find_published(out: Path, request: Request) -> Artifact | None:
    """Returns the finished artifact for this very request, or None where nothing is at `out`.

    Working notes of a writer that was killed right after the rename are removed. Raises Conflict
    where something else is at `out`.
    """
    if out.name in ("", ".."):
        raise InvalidInput(
            f"the output must be a directory with a name, got {str(out)!r}",
            remedy="give a new directory",
        )
    is_there = is_finished(out)
    if not os.path.lexists(out):
        return None
    if not is_there:
        raise Conflict(
            f"{out} exists and is not an artifact", remedy="give another output directory"
        )
    artifact = open_artifact(out, verify_files=False)
    identity = artifact.request().identity()
    identity["config"].pop(
        GROWN, None
    )  # it does not matter whether it was made at once or bit by bit
    # the result brings its own, for a model that did not exist before
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
    """Gives the unfinished work at `out` another config, with which its next attempt goes on.

    The caller decides that what is done stays valid. Raises Conflict where a process works on it.
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
    attempt. The exception is an attempt that began the draft and ends because the input or the
    settings are at fault: no attempt can finish such a draft, so it is removed, unless `keep` was
    called. A draft of another request is refused.

    `fresh`: discards the results of earlier attempts. `shared`: several processes may enter the
    draft, all of them shared. Files that several of them write under one name must have the same
    bytes, or be written `together` with the files that belong to them. A process that comes too
    late, after the draft was published or removed, gets a Conflict. Hidden files are working notes:
    they are removed when the artifact is published.

    The files of a draft for an output at a URL are written there, too, as soon as each is finished,
    unless `stays_here`.
    """

    def __init__(
        self,
        out: Path,
        request: Request,
        *,
        fresh: bool = False,
        shared: bool = False,
        stays_here: bool = False,
    ) -> None:
        self.out = out
        self._fresh, self._shared, self._began = fresh, shared, False
        self.request = request
        self.path = draft_path(out)
        self._uploads: Nowhere | Uploads = (
            Nowhere(self.path) if stays_here else uploads_of(out, self.path, shared=shared)
        )
        self._descriptor: int | None = None
        self._entries: dict[str, FileEntry] = {}
        self._waiting: list[tuple[Path, str]] | None = None

    def __enter__(self) -> Self:
        with translate_os_errors(self.out):
            make_room(self.out)
            # a process that shares a draft got an existing path: a missing one may be on a disk
            # that is away
            if not self._shared:
                self.out.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = lock_directory(
                self.path, fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX
            )
            try:
                self._uploads.begin(self.request.canonical(), fresh=self._fresh)
                self._claim()
                self._began |= self._uploads.began and not self._shared
            except BaseException:
                self._unlock()
                raise
        return self

    def _claim(self) -> None:
        """Continues a draft of the same request, or begins one where there is none."""
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
        self._began = not self._shared

    def read_request(self) -> dict[str, Any] | None:
        """Returns the identity of the request whose unfinished work is there; None without such
        work.
        """
        begun = self.note(REQUEST)
        identity: dict[str, Any] | None = None if begun is None else json.loads(begun)
        return identity

    def note(self, name: str) -> str | None:
        """Returns a working note, of an output at a URL that which is there; None where there is
        none.
        """
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
        if at_fault and self._began:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(MlcdError):  # the error that the block ends with tells more
                self._uploads.discard()
        self._unlock()
        if error is not None:
            refuse_full_disk(error, self.out)

    def keep(self) -> None:
        """Keeps all files from now on, whatever fails: they are worth more than a clean
        directory.
        """
        self._began = False

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def has(self, name: str) -> bool:
        """Tells whether the file was finished, now or by an earlier attempt, here or elsewhere."""
        return (self.path / name).is_file() or self._uploads.fetch(name)

    def remove_note(self, name: str) -> None:
        """Removes a working note, of an output at a URL there, too."""
        self._uploads.remove_note(name)

    def file(self, name: str) -> Path:
        """Returns the path of a file that was finished, here or elsewhere."""
        self.has(name)
        return self.path / name

    def fetch_all(self) -> None:
        """Takes all files that other machines have finished into the draft."""
        self._uploads.fetch_all()

    @contextmanager
    def write(self, name: str) -> Iterator[Path]:
        """Yields a temporary path to write; on success the file is synced to disk and renamed to
        `name`.
        """
        final = self.path / name
        temporary = temporary_path(final)
        with translate_os_errors(self.out):
            self._check_in_use()
            final.parent.mkdir(parents=True, exist_ok=True)
            is_kept = False
            try:
                yield temporary
                self._entries[name] = measure(temporary)
                sync_path(temporary)
                if is_kept := self._waiting is not None:
                    self._waiting.append((temporary, name))
                else:
                    temporary.rename(final)
                    self._uploads.put(name)
            except FileNotFoundError:
                self._check_in_use()
                raise
            finally:
                if not is_kept:
                    temporary.unlink(missing_ok=True)

    @contextmanager
    def all_or_none(self, last: str) -> Iterator[None]:
        """Holds back the files that the block writes until its end; then they appear, `last` as the
        last one.

        Where `last` exists by then, none of them appears. So files that belong together come from
        one process, even where another one that was thought dead continues later.
        """
        waiting = self._waiting = []
        try:
            yield
            self._waiting = None
            self._check_in_use()
            with translate_os_errors(self.out), hold_lock(self.path / _TOGETHER):
                self._show(waiting, last)
        finally:
            self._waiting = None
            for temporary, _ in waiting:
                temporary.unlink(missing_ok=True)

    def _show(self, waiting: list[tuple[Path, str]], last: str) -> None:
        assert waiting[-1][1] == last
        shown = self.has(last)
        for temporary, name in waiting:
            if shown:
                del self._entries[name]
            else:
                temporary.rename(self.path / name)
                self._uploads.put(name)

    def _check_in_use(self) -> None:
        """Raises Conflict where the directory that was entered has left its path."""
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
        """Copies the artifact at `child` to the sub-directory `name`: complete, or not at all."""
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
        """Writes the manifest over everything in the draft and renames the draft to its final path.

        fingerprint: of the model, where it is known only now. logs: files that are kept outside of
        the identity.
        """
        with translate_os_errors(self.out):
            files, children = inventory(self.path, self._entries)
            kept_logs = {name: files.pop(name) for name in logs if name in files}
            manifest = {
                "schema": SCHEMA,
                "kind": self.request.kind,
                "config": dict(self.request.config),
                "parents": [asdict(parent) for parent in self.request.parents],
                "fingerprint": fingerprint or self.request.fingerprint,
                "files": {name: asdict(entry) for name, entry in files.items()},
                "children": children,
                "logs": {name: asdict(entry) for name, entry in kept_logs.items()},
                "summary": dict(summary or {}),
                "code_version": __version__,
                "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            write_synced(self.path / MANIFEST, seal_manifest(manifest))
            self._share([*files, *kept_logs])
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
        """Renames the draft to its final path without a manifest: its files are not ours, which no
        mode and no digest of ours may touch. Raises Conflict where something is there.
        """
        with translate_os_errors(self.out):
            if os.path.lexists(self.out):
                raise Conflict(f"{self.out} appeared meanwhile", remedy="give another directory")
            self.path.rename(self.out)
            sync_path(self.out.parent)
            _clear_notes(self.out)

    def _share(self, names: list[str]) -> None:
        """Gives all files the mode of the manifest; safetensors makes its own readable by their
        owner only.
        """
        mode = stat.S_IMODE((self.path / MANIFEST).stat().st_mode)
        for name in names:
            path = self.path / name
            if stat.S_IMODE(path.stat().st_mode) != mode:  # only its owner may change the mode
                path.chmod(mode)


def _clear_notes(out: Path) -> None:
    """Deletes the working notes that this process may delete; the one that marks that there are
    some goes last.

    Other processes that do the same may leave some.
    """
    with suppress(OSError):
        for entry in sorted(out.glob(".*"), key=lambda entry: entry.name == REQUEST):
            _remove(entry)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
