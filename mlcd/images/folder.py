"""The sources for a folder of image files, or for some of its files."""

import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from mlcd.errors import ImageRejected
from mlcd.images.caption_files import (
    MAX_BYTES,
    SIDECARS,
    TABLES,
    TABLES_OF_CAPTIONS,
    captions_beside,
    captions_in_table,
)
from mlcd.images.entries import Entry
from mlcd.images.faults import reason_of, unavailable
from mlcd.images.names import decode_path, encode_path, is_candidate, printable
from mlcd.images.read_ahead import ReadAhead
from mlcd.images.remote_files import is_object_store, is_remote, read, threads
from mlcd.images.sidecars import Spellings
from mlcd.images.source import ListingProblem, Source
from mlcd.types import SampleKey

_CONNECTIONS: Final = 16  # concurrent reads of images from a store
# replaces the path of an item that is neither file nor folder
_NO_FILE: Final = b""


class FolderSource(Source):
    """A source of every file below a folder, except hidden files and sidecars; the class is the
    path of the sub-folder.

    Links and special files are listed without a size and not read: a link may lead anywhere, and a
    pipe never ends.
    """

    def __init__(self, location: str, filesystem: Any, root: str) -> None:
        super().__init__(location)
        self._filesystem, self._root = filesystem, root.rstrip("/")

    def entry_tables(self) -> Iterator[pa.Table]:
        folders = [self._table_of(files) for files in self._walk()]
        if folders:
            table = pa.concat_tables(folders).sort_by("key")
            class_names = pc.struct_field(
                pc.extract_regex(table["key"], r"(?s)^(?P<parent>.+)/"), "parent"
            )
            yield table.add_column(1, "class_name", class_names)

    def _walk(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the contents of the folder, in parts.

        Keys of an object store may contain `//`, `.` and `..` as ordinary parts, so listing folder
        by folder would miss keys. fsspec's own walk skips folders that it cannot list.
        """
        if is_object_store(self._filesystem):
            yield self._objects()
            return
        folders = [self._root]
        while folders:
            folder = folders.pop()
            try:
                listed = self._filesystem.ls(folder, detail=True)
            except OSError as error:
                raise unavailable(folder, error) from error
            # a folder may be listed in itself
            inside = [info for info in listed if info["name"].rstrip("/") != folder]
            folders += [info["name"].rstrip("/") for info in inside if info["type"] == "directory"]
            yield inside

    def _objects(self) -> list[dict[str, Any]]:
        """Returns the objects below the root, without the empty objects that represent folders.

        A nonempty object whose name ends with / is reported as a problem: the store's library would
        read it under another name.
        """
        try:
            listed = self._filesystem.find(self._root, detail=True).values()
        except OSError as error:
            raise unavailable(self._root, error) from error
        objects = [info for info in listed if info["name"].startswith(f"{self._root}/")]
        for info in objects:
            if info["name"].endswith("/") and info["size"]:
                key = printable(info["name"][len(self._root) + 1 :])
                self.problems.append(ListingProblem(key, "its name ends with /, as a folder's"))
        return [info for info in objects if not info["name"].endswith("/")]

    def rename(self, name_of: Callable[[SampleKey], SampleKey]) -> None:
        # a null path stands for the key
        self.entries = self.entries.fill_nulls_with_keys("path")
        super().rename(name_of)

    def _table_of(self, files: Iterable[dict[str, Any]]) -> pa.Table:
        """Returns the files as a table, without classes.

        path: the name if it differs from the key, because it is not valid UTF-8; or `_NO_FILE`.
        """
        keys, sizes, paths = [], [], []
        for info in files:
            name = info["name"][len(self._root) + 1 :]
            if info["type"] != "directory" and is_candidate(PurePosixPath(name)):
                is_file = info["type"] == "file"
                keys.append(printable(name))
                sizes.append(int(info["size"]) if is_file else 0)
                paths.append(
                    _NO_FILE if not is_file else None if name == keys[-1] else encode_path(name)
                )
        return pa.table(
            {
                "key": pa.array(keys, pa.large_string()),
                "size_bytes": pa.array(sizes, pa.int64()),
                "path": pa.array(paths, pa.large_binary()),
            }
        )

    @contextmanager
    def _reading_ahead(self, entries: Iterable[Entry]) -> Iterator[ReadAhead | None]:
        if not is_remote(self._filesystem):
            yield None
            return
        with threads(_CONNECTIONS) as pool:
            yield ReadAhead((entry, pool.submit(self._read, entry).result) for entry in entries)

    def _read(self, entry: Entry) -> bytes:
        if entry.locator == (_NO_FILE,):
            raise ImageRejected("unreadable", "a link or a special file: these are not followed")
        try:
            return read(self._filesystem, self._path(entry))
        except (OSError, ValueError) as error:
            reason = f": {reason_of(error)}" if isinstance(error, PermissionError) else ""
            raise ImageRejected("unreadable", f"the file cannot be read{reason}") from error

    def captions(self) -> Iterator[tuple[str, str]]:
        """Yields the captions of the folder's first table with captions, or else the captions in
        files beside the images.
        """
        files = self._files_in(self._root)
        for name in TABLES:
            table = f"{self._root}/{name}"
            if table not in files:
                continue
            captions = self._captions_in_table(
                table, is_of_captions=name.startswith(TABLES_OF_CAPTIONS)
            )
            if first := next(captions, None):
                yield first
                yield from captions
                return
        yield from self._captions_beside()

    def _captions_in_table(self, table: str, *, is_of_captions: bool) -> Iterator[tuple[str, str]]:
        try:
            with self._filesystem.open(table, "rb") as file:
                yield from captions_in_table(printable(table), file, is_of_captions=is_of_captions)
        except OSError as error:
            raise unavailable(table, error) from error

    def _captions_beside(self) -> Iterator[tuple[SampleKey, str]]:
        """Yields captions from files that have the name of an image with another suffix."""
        read = (entry for entry in self.entries if entry.locator != (_NO_FILE,))
        for folder, entries in groupby(read, lambda entry: posixpath.dirname(self._path(entry))):
            files = Spellings(self._files_in(folder))
            for entry in entries:
                stem = posixpath.splitext(self._path(entry))[0]
                beside = ((suffix, files.find(stem + suffix)) for suffix in SIDECARS)
                texts_beside = (
                    captions_beside(suffix, *self._sidecar(file, suffix))
                    for suffix, file in beside
                    if file is not None
                )
                for text in next(filter(None, texts_beside), []):
                    yield entry.key, text

    def _sidecar(self, file: str, suffix: str) -> tuple[bytes, str]:
        """Returns the start of a file, and its printable name without the suffix."""
        try:
            data = self._filesystem.cat_file(file, end=MAX_BYTES + 1)
        except OSError as error:
            raise unavailable(file, error) from error
        return data, printable(file.removesuffix(suffix))

    def _files_in(self, folder: str) -> set[str]:
        """Returns the paths of the files of a folder, without links and special files."""
        try:
            listed = self._filesystem.ls(folder, detail=True)
        except OSError as error:
            raise unavailable(folder, error) from error
        return {info["name"] for info in listed if info["type"] == "file"}

    def _path(self, entry: Entry) -> str:
        (path,) = entry.locator
        return f"{self._root}/{entry.key if path is None else decode_path(path)}"

    def files_of(self, entries: Sequence[Entry]) -> list[str]:
        return [self._path(entry) for entry in entries if entry.locator != (_NO_FILE,)]

    def find_changed_files(self, entries: Sequence[Entry]) -> Iterator[str]:
        files = (entry for entry in entries if entry.locator != (_NO_FILE,))
        return (entry.key for entry in files if self._size(entry) != entry.size_bytes)

    def _size(self, entry: Entry) -> int | None:
        path = self._path(entry)
        try:
            info = self._filesystem.info(path)
            if info["type"] == "directory" and is_object_store(self._filesystem):
                info = self._filesystem.info(
                    path, refresh=True
                )  # a cached listing hides such a key
            return int(info["size"])
        except (OSError, ValueError):
            return None


class NamedFilesSource(FolderSource):
    """A source of the files below a folder that a pattern or a list names."""

    def __init__(
        self, location: str, filesystem: Any, root: str, files: list[dict[str, Any]]
    ) -> None:
        """files: descriptions of the files, from the file system."""
        super().__init__(location, filesystem, root)
        self._files = files
        self.paths = [info["name"] for info in files]

    def _walk(self) -> Iterator[list[dict[str, Any]]]:
        yield self._files
