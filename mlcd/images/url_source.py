"""Reads images at the URLs in a table's column or a list."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from mlcd.errors import ImageRejected
from mlcd.fetching.downloads import Downloads
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.entries import Entry
from mlcd.images.read_ahead import ReadAhead
from mlcd.images.source import Source


class UrlSource(Source):
    """The images at the URLs in another source, `links`, which has URLs in place of images."""

    def __init__(self, links: Source, options: UrlOptions) -> None:
        super().__init__(links.location)
        self.config = {"urls": {"column": options.column}}
        self._links, self._policy = links, options.policy()
        self.paths, self.problems = links.paths, links.problems

    def listing_digest(self) -> str:
        """Returns the SHA-256 of keys and URLs, without requesting the images."""
        sha256 = hashlib.sha256()
        for entry in self.entries:
            sha256.update(f"{entry.key}\0".encode() + self._links.read(entry) + b"\0")
        return sha256.hexdigest()

    def captions(self) -> Iterator[tuple[str, str]]:
        return self._links.captions()

    def files_of(self, entries: Sequence[Entry]) -> list[str]:
        return self._links.files_of(entries)

    def find_changed_files(self, entries: Sequence[Entry]) -> Iterator[str]:
        return self._links.find_changed_files(entries)

    def entry_tables(self) -> Iterator[pa.Table]:
        return self._links.entry_tables()

    def _read(self, entry: Entry) -> bytes:
        with Downloads(self._policy) as downloads:
            return downloads.begin(self._url(entry))()

    @contextmanager
    def _reading_ahead(self, entries: Iterable[Entry]) -> Iterator[ReadAhead | None]:
        with Downloads(self._policy) as downloads:
            started = ((entry, downloads.begin(self._url(entry))) for entry in entries)
            yield ReadAhead(started, downloads.is_full)

    def _url(self, entry: Entry) -> str:
        """Returns the URL, not validated; an empty text for a cell that cannot be read."""
        try:
            return self._links.read(entry).decode()
        except (ImageRejected, UnicodeDecodeError):
            return ""
