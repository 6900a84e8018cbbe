"""The interface of all sources: numbered images, each with a permanent key."""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Self

import pyarrow as pa

from mlcd.errors import Conflict, ImageRejected, InvalidInput
from mlcd.images.decode import DEFAULT_LIMITS
from mlcd.images.entries import Entries, Entry
from mlcd.images.faults import is_fault
from mlcd.images.names import decode_path, printable
from mlcd.images.read_ahead import ReadAhead
from mlcd.images.remote_files import is_remote
from mlcd.images.shard_index import file_state
from mlcd.types import SampleKey


@dataclass(frozen=True)
class ListingProblem:
    """A whole shard, or a part of it, that could not be listed."""

    key: SampleKey
    detail: str


class Source(ABC):
    """A numbered set of images."""

    def __init__(self, location: str) -> None:
        self.location = location
        # files that the user named, singly or by a pattern, as paths of the file system; empty for
        # a whole folder
        self.paths: list[str] = []
        self.problems: list[ListingProblem] = []
        # keys of images that the file system failed to read, in the order of reading; the images
        # may be intact
        self.faults: list[SampleKey] = []
        # access options that are part of an artifact's identity
        self.config: dict[str, Any] = {}
        self._read_ahead: ReadAhead | None = None
        # whether to check that files are unchanged after their images were read
        self._is_checked = False

    @cached_property
    def entries(self) -> Entries:
        """Returns all images in a stable order.

        Raises InvalidInput if two images share a key, and Unavailable if a file system fails or
        denies access: otherwise its images would be missing without notice.
        """
        entries = Entries.of(self.entry_tables())
        if (key := entries.find_repeated_key()) is not None:
            raise InvalidInput(
                f"{self.location} has two images named {key}", remedy="make the names distinct"
            )
        return entries

    def only(self, keys: pa.ChunkedArray) -> Self:
        """Returns a copy of the source with only the images of these keys (large_string), in the
        source's order.

        Raises InvalidInput if all of them are missing.
        """
        indices = self.entries.indices_of(keys, f"the selection of {self.location}")
        if not len(indices):
            raise InvalidInput(
                f"{self.location} lacks all images of the selection",
                remedy="give the images that the selection was made from",
            )
        chosen = copy.copy(self)
        chosen.entries = self.entries.select(indices)
        return chosen

    def rename(self, name_of: Callable[[SampleKey], SampleKey]) -> None:
        """Replaces the key of each image, and of each file that cannot be listed, by
        `name_of(key)`.
        """
        self.entries = self.entries.rename(name_of)
        self.problems = [replace(each, key=name_of(each.key)) for each in self.problems]

    def read(self, entry: Entry) -> bytes:
        """Returns the encoded image. Raises ImageRejected if it cannot be read. It is
        thread-safe.
        """
        wait = None if self._read_ahead is None else self._read_ahead.take(entry)
        if entry.size_bytes > DEFAULT_LIMITS.max_bytes:
            limit = DEFAULT_LIMITS.max_bytes
            raise ImageRejected(
                "too-many-bytes", f"{entry.size_bytes} bytes, more than the limit of {limit}"
            )
        try:
            return self._read(entry) if wait is None else wait()
        except ImageRejected as rejection:
            if is_fault(rejection.__cause__):
                self.faults.append(entry.key)
            raise

    @contextmanager
    def ahead(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Announces that these images will be read, about in this order.

        A remote source starts to read images before they are requested; a nested announcement has
        no effect. At the end, raises Conflict if files in a store were replaced meanwhile.
        """
        if self._read_ahead is not None:
            yield
        else:
            with self._reading_ahead(entries) as read_ahead:
                self._read_ahead = read_ahead
                try:
                    yield
                finally:
                    self._read_ahead = None
        if self._is_checked:
            self.check_unchanged(entries)

    @contextmanager
    def _reading_ahead(self, entries: Iterable[Entry]) -> Iterator[ReadAhead | None]:
        """Yields the `ReadAhead` of these entries; None for a local source."""
        del entries
        yield None

    @abstractmethod
    def entry_tables(self) -> Iterator[pa.Table]:
        """Yields tables for `Entries.of`, about one per file, so that only a part exists as Python
        objects at a time.
        """

    @abstractmethod
    def _read(self, entry: Entry) -> bytes: ...

    @abstractmethod
    def captions(self) -> Iterator[tuple[str, str]]:
        """Yields (key, caption) from files beside the images. The key is written as in these files
        (see `mlcd.images.matched_keys`). An image may have several captions.
        """

    @abstractmethod
    def files_of(self, entries: Sequence[Entry]) -> list[str]:
        """Returns the paths of the files that contain these images, without unreadable special
        files.
        """

    def check_unchanged(self, entries: Sequence[Entry]) -> None:
        """Raises Conflict naming the first file of these images that has changed since it was
        listed.
        """
        name = next(self.find_changed_files(entries), None)
        if name is not None:
            raise Conflict(
                f"{name} of {self.location} has changed since it was listed", remedy="begin again"
            )

    @abstractmethod
    def find_changed_files(self, entries: Sequence[Entry]) -> Iterator[str]:
        """Yields the names of the files of these images that have changed since they
        were listed.
        """

    def check_not_empty(self) -> None:
        """Raises InvalidInput for an empty source, naming the first file that cannot be listed."""
        if self.entries:
            return
        if self.problems:
            problem, more = self.problems[0], len(self.problems) - 1
            more_problems = f", and {more} more" if more else ""
            raise InvalidInput(
                f"no image of {self.location} can be listed: {problem.key}:"
                f" {problem.detail}{more_problems}",
                remedy="restore the file, or give others",
            )
        raise InvalidInput(
            f"{self.location} must hold images, found none",
            remedy="is it the folder or shards you meant?",
        )

    def listing_digest(self) -> str:
        """Returns SHA-256 over keys and sizes: a cheap check that the source still has the same
        files.
        """
        sha256 = hashlib.sha256()
        for key, size_bytes in zip(self.entries.keys(), self.entries.sizes_bytes(), strict=True):
            sha256.update(f"{key}\0{size_bytes}\0".encode())
        return sha256.hexdigest()


class FilesSource(Source):
    """A source of archives. paths: paths of the archives in the file system."""

    def __init__(self, location: str, filesystem: Any, paths: list[str]) -> None:
        super().__init__(location)
        self._filesystem = filesystem
        self._is_checked = is_remote(filesystem)  # in a replaced file, a range is another image
        self.paths = paths
        self._listed: dict[str, bytes | None] = {}

    def files_of(self, entries: Sequence[Entry]) -> list[str]:
        return list(dict.fromkeys(decode_path(entry.locator[0]) for entry in entries))

    def find_changed_files(self, entries: Sequence[Entry]) -> Iterator[str]:
        self._filesystem.invalidate_cache()  # drops cached listings of the store
        return (
            path
            for path in self.files_of(entries)
            if file_state(self._filesystem, path) != self._listed[path]
        )

    def _names_to_list(self) -> list[tuple[str, str]]:
        """Records the state of each file before it is listed; returns `_names`."""
        self._listed = {path: file_state(self._filesystem, path) for path in self.paths}
        return self._names()

    def _names(self) -> list[tuple[str, str]]:
        """Returns (path, the part of the path that distinguishes the files, without suffix)."""
        parents = [PurePosixPath(path).parent.parts for path in self.paths]
        common = 0
        while all(len(parts) > common and parts[common] == parents[0][common] for parts in parents):
            common += 1
        return [
            (
                path,
                printable(
                    PurePosixPath(*PurePosixPath(path).parts[common:]).with_suffix("").as_posix()
                ),
            )
            for path in self.paths
        ]
