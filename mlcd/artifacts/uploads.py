"""An unfinished artifact in an object store: each file of a draft is uploaded once it is finished.

Files have their final names from the start. Readers ignore them until the manifest exists; it is
written last, and never replaces another. A stored request identifies the work, so the same command
can continue it on any machine.
"""

import secrets
import shutil
from pathlib import Path
from typing import Final

from mlcd.artifacts.directories import Directory
from mlcd.artifacts.disk import write_synced
from mlcd.artifacts.listed_files import for_files, is_hidden
from mlcd.artifacts.manifest import MANIFEST, parse_manifest
from mlcd.errors import Conflict, NotFound
from mlcd.locations import url_of

REQUEST: Final = ".request.json"
WRITER: Final = ".writer"  # id of the writing process, unless several machines share the work


class Nowhere:
    """A draft on this machine whose files are not uploaded: the usual case."""

    def __init__(self, draft: Path) -> None:
        self._draft = draft
        self.began = False

    def note(self, name: str) -> str | None:
        """Returns the text of a working note; None if it does not exist."""
        return _read_local_note(self._draft, name)

    def begin(self, identity: str, *, fresh: bool) -> None:
        """Continues or starts the work of this request; sets `began` if there was none to continue.

        fresh: remove work of another request instead of raising Conflict.
        """

    def remove_note(self, name: str) -> None:
        """Removes a working note."""
        (self._draft / name).unlink(missing_ok=True)

    def put(self, name: str) -> None:
        """Uploads a file of the draft."""

    def fetch(self, name: str) -> bool:
        """Downloads a file that another machine uploaded; tells whether it exists."""
        del name
        return False

    def fetch_all(self) -> None:
        """Downloads all files that other machines uploaded into the draft."""

    def publish(self) -> None:
        """Uploads the missing files of the draft, and its manifest last."""

    def discard(self) -> None:
        """Removes all uploaded files, unless they are published."""

    def clear_notes(self) -> None:
        """Removes the working notes of a published artifact."""


def _read_local_note(draft: Path, name: str) -> str | None:
    try:
        return (draft / name).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def uploads_of(out: Path, draft: Path, *, shared: bool) -> "Nowhere | Uploads":
    """Returns the uploads of the draft for `out`; `Nowhere` if `out` is not at a URL."""
    url = url_of(out)
    return Nowhere(draft) if url is None else Uploads(url, draft, shared=shared)


class Uploads:
    """The uploads of an output at a URL; `Nowhere` documents the methods.

    shared: several machines work on the output; each downloads only the files that it requests.
    """

    def __init__(self, url: str, draft: Path, *, shared: bool) -> None:
        self._draft = draft
        self.began = False
        self._remote, self._shared = Directory.at(url), shared

    def note(self, name: str) -> str | None:
        try:
            return self._remote.read(name).decode()
        except NotFound:
            return None

    def remove_note(self, name: str) -> None:
        (self._draft / name).unlink(missing_ok=True)
        self._remote.remove([name])

    def begin(self, identity: str, *, fresh: bool) -> None:
        sizes = self._remote.sizes()
        self._check_unfinished(sizes)
        stored_identity = self.note(REQUEST) if REQUEST in sizes else None
        if stored_identity is None and any(not is_hidden(name) for name in sizes):
            raise Conflict(
                f"{self._remote.location} contains other files, such as"
                f" {min(name for name in sizes if not is_hidden(name))}",
                remedy="give another output",
            )
        if stored_identity not in (None, identity):
            if not fresh:
                raise self._other_request_error()
            self.discard()
        self.began = stored_identity != identity
        if self.began:
            try:
                is_first = self._remote.create(REQUEST, identity.encode())
            except NotFound as error:  # the bucket
                raise NotFound(
                    f"{self._remote.location} does not exist", remedy=error.remedy
                ) from error
            if not is_first and self.note(REQUEST) != identity:
                raise self._other_request_error()
        if _read_local_note(self._draft, REQUEST) != identity:
            self._empty_draft()
            write_synced(self._draft / REQUEST, identity.encode())
        if not self._shared:
            self._take_over()
            self._remote.abort_uploads()
            self._fetch(sizes)

    def _take_over(self) -> None:
        """Records this process as the writer; an earlier writer stops at its next file."""
        writer = secrets.token_hex(8)
        write_synced(self._draft / WRITER, writer.encode())
        self._remote.write(WRITER, writer.encode())

    def _empty_draft(self) -> None:
        """Removes all local files of the draft: only the uploaded files are valid."""
        for entry in list(self._draft.iterdir()):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def put(self, name: str) -> None:
        self._check_not_taken_over()
        size_bytes = (self._draft / name).stat().st_size
        self._remote.copy_unverified(name, Directory.at(self._draft), size_bytes)

    def _check_not_taken_over(self) -> None:
        """Raises Conflict if the work was published, removed or taken over meanwhile."""
        if self._shared:
            is_ours = self._remote.has(REQUEST)
        else:
            is_ours = self.note(WRITER) == _read_local_note(self._draft, WRITER)
        if not is_ours:
            raise Conflict(
                f"{self._remote.location} was published, removed or taken over meanwhile",
                remedy="check which other process writes there, and run the same command again",
            )

    def fetch(self, name: str) -> bool:
        if self._shared:
            try:
                Directory.at(self._draft).copy_unverified(name, self._remote)
            except NotFound:
                return False
        return self._shared

    def fetch_all(self) -> None:
        self._fetch(self._remote.sizes())

    def _fetch(self, remote_sizes: dict[str, int]) -> None:
        draft = Directory.at(self._draft)
        sizes = draft.sizes()
        missing = [
            name
            for name in remote_sizes.keys() - {REQUEST, WRITER, MANIFEST}
            if is_hidden(name) or sizes.get(name) != remote_sizes[name]
        ]
        for _ in for_files(
            lambda name: draft.copy_unverified(name, self._remote, remote_sizes[name]), missing
        ):
            pass

    def publish(self) -> None:
        remote_sizes, draft = self._remote.sizes(), Directory.at(self._draft)
        for name, size in draft.sizes().items():
            if name != MANIFEST and not is_hidden(name) and remote_sizes.get(name) != size:
                self.put(name)
        self._check_not_taken_over()
        self._remote.abort_uploads()
        if not self._remote.create(MANIFEST, draft.read(MANIFEST)):
            self._adopt_manifest(draft)
        self._remote.remove([name for name in remote_sizes if is_hidden(name)])

    def _adopt_manifest(self, draft: Directory) -> None:
        """Copies the manifest that another process published first, if its digest is the same."""
        digests = [
            parse_manifest(directory.read(MANIFEST), Path(directory.location)).digest
            for directory in (draft, self._remote)
        ]
        if digests[0] != digests[1]:
            raise Conflict(
                f"{self._remote.location} appeared meanwhile", remedy="give another output"
            )
        write_synced(self._draft / MANIFEST, self._remote.read(MANIFEST))

    def discard(self) -> None:
        sizes = self._remote.sizes()
        if MANIFEST in sizes:
            return
        self._remote.abort_uploads()
        self._remote.remove([name for name in sizes if name != REQUEST])
        self._remote.remove([name for name in sizes if name == REQUEST])

    def clear_notes(self) -> None:
        self._remote.remove([name for name in self._remote.sizes() if is_hidden(name)])

    def _check_unfinished(self, sizes: dict[str, int]) -> None:
        if MANIFEST in sizes:
            raise Conflict(
                f"{self._remote.location} was published meanwhile",
                remedy="check whether the output exists",
            )

    def _other_request_error(self) -> Conflict:
        return Conflict(
            f"{self._remote.location} contains unfinished work on other input or settings",
            remedy="remove it or give another output",
        )
