"""An unfinished artifact in an object store, which gets each file of a draft once it is finished.

Files have their final names from the beginning. Nothing reads them before the manifest is there,
which comes last, and only where there is none. A request beside them says whose work they are: the
same command goes on with them on any machine.
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
WRITER: Final = ".writer"  # the process that writes, unless several share the work


class Nowhere:
    """The ordinary case: a draft on this machine, whose files go nowhere else."""

    def __init__(self, draft: Path) -> None:
        self._draft = draft
        self.began = False

    def note(self, name: str) -> str | None:
        """Returns a working note; None where there is none."""
        return _note_here(self._draft, name)

    def begin(self, identity: str, *, fresh: bool) -> None:
        """Continues the work of this request or begins it: `began` tells whether nothing was
        there.

        fresh: removes work of another request, which raises Conflict otherwise.
        """

    def remove_note(self, name: str) -> None:
        """Removes a working note."""
        (self._draft / name).unlink(missing_ok=True)

    def put(self, name: str) -> None:
        """Writes a file of the draft."""

    def fetch(self, name: str) -> bool:
        """Takes a file that another machine has made into the draft, and tells whether there is
        one.
        """
        del name
        return False

    def fetch_all(self) -> None:
        """Takes all files that other machines have made into the draft."""

    def publish(self) -> None:
        """Writes the files of the draft that are missing, and its manifest last."""

    def discard(self) -> None:
        """Removes all files, where they are not published."""

    def clear_notes(self) -> None:
        """Removes working notes beside an artifact that was published."""


def _note_here(draft: Path, name: str) -> str | None:
    try:
        return (draft / name).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def uploads_of(out: Path, draft: Path, *, shared: bool) -> "Nowhere | Uploads":
    """Returns the place that gets the files of the draft for `out`."""
    url = url_of(out)
    return Nowhere(draft) if url is None else Uploads(url, draft, shared=shared)


class Uploads:
    """The place of the files of an output at a URL; each method does what it says in `Nowhere`.

    shared: several machines work on it, and take from each other only what they ask for.
    """

    def __init__(self, url: str, draft: Path, *, shared: bool) -> None:
        self._draft = draft
        self.began = False
        self._there, self._shared = Directory.at(url), shared

    def note(self, name: str) -> str | None:
        try:
            return self._there.read(name).decode()
        except NotFound:
            return None

    def remove_note(self, name: str) -> None:
        (self._draft / name).unlink(missing_ok=True)
        self._there.remove([name])

    def begin(self, identity: str, *, fresh: bool) -> None:
        sizes = self._there.sizes()
        self._check_unfinished(sizes)
        begun = self.note(REQUEST) if REQUEST in sizes else None
        if begun is None and any(not is_hidden(name) for name in sizes):
            raise Conflict(
                f"{self._there.location} holds other files, such as"
                f" {min(name for name in sizes if not is_hidden(name))}",
                remedy="give an output of its own",
            )
        if begun not in (None, identity):
            if not fresh:
                raise self._of_other_request()
            self.discard()
        self.began = begun != identity
        if self.began:
            is_first = self._there.create(REQUEST, identity.encode())
            if not is_first and self.note(REQUEST) != identity:
                raise self._of_other_request()
        if _note_here(self._draft, REQUEST) != identity:
            self._empty_draft()
            write_synced(self._draft / REQUEST, identity.encode())
        if not self._shared:
            self._take_over()
            self._there.abort_uploads()
            self._fetch(sizes)

    def _take_over(self) -> None:
        """Notes there and here who writes now: whoever wrote before stops at its next file."""
        writer = secrets.token_hex(8)
        write_synced(self._draft / WRITER, writer.encode())
        self._there.write(WRITER, writer.encode())

    def _empty_draft(self) -> None:
        """Removes what this machine has of other work: it is what is there that counts."""
        for entry in list(self._draft.iterdir()):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def put(self, name: str) -> None:
        self._check_ours()
        size_bytes = (self._draft / name).stat().st_size
        self._there.take(name, Directory.at(self._draft), size_bytes)

    def _check_ours(self) -> None:
        """Raises Conflict where the work was published, removed or taken over meanwhile."""
        if self._shared:
            is_ours = self._there.has(REQUEST)
        else:
            is_ours = self.note(WRITER) == _note_here(self._draft, WRITER)
        if not is_ours:
            raise Conflict(
                f"{self._there.location} was published, removed or taken over meanwhile",
                remedy="see who else writes there, and run the same command again",
            )

    def fetch(self, name: str) -> bool:
        if self._shared:
            try:
                Directory.at(self._draft).take(name, self._there)
            except NotFound:
                return False
        return self._shared

    def fetch_all(self) -> None:
        self._fetch(self._there.sizes())

    def _fetch(self, sizes_there: dict[str, int]) -> None:
        draft = Directory.at(self._draft)
        sizes = draft.sizes()
        missing = [
            name
            for name in sizes_there.keys() - {REQUEST, WRITER, MANIFEST}
            if is_hidden(name) or sizes.get(name) != sizes_there[name]
        ]
        for _ in for_files(lambda name: draft.take(name, self._there, sizes_there[name]), missing):
            pass

    def publish(self) -> None:
        sizes_there, draft = self._there.sizes(), Directory.at(self._draft)
        for name, size in draft.sizes().items():
            if name != MANIFEST and not is_hidden(name) and sizes_there.get(name) != size:
                self.put(name)
        self._check_ours()
        self._there.abort_uploads()
        if not self._there.create(MANIFEST, draft.read(MANIFEST)):
            self._take_manifest(draft)
        self._there.remove([name for name in sizes_there if is_hidden(name)])

    def _take_manifest(self, draft: Directory) -> None:
        """Takes the manifest of a process that was first, where it made the same."""
        digests = [
            parse_manifest(directory.read(MANIFEST), Path(directory.location)).digest
            for directory in (draft, self._there)
        ]
        if digests[0] != digests[1]:
            raise Conflict(
                f"{self._there.location} appeared meanwhile", remedy="give another output"
            )
        write_synced(self._draft / MANIFEST, self._there.read(MANIFEST))

    def discard(self) -> None:
        sizes = self._there.sizes()
        if MANIFEST in sizes:
            return
        self._there.abort_uploads()
        self._there.remove([name for name in sizes if name != REQUEST])
        self._there.remove([name for name in sizes if name == REQUEST])

    def clear_notes(self) -> None:
        self._there.remove([name for name in self._there.sizes() if is_hidden(name)])

    def _check_unfinished(self, sizes: dict[str, int]) -> None:
        if MANIFEST in sizes:
            raise Conflict(
                f"{self._there.location} was published meanwhile",
                remedy="see whether the output is there",
            )

    def _of_other_request(self) -> Conflict:
        return Conflict(
            f"{self._there.location} holds unfinished work on other input or settings",
            remedy="remove it or give another output",
        )
