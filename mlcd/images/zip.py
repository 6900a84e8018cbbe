"""Reads images from zip files."""

import posixpath
import threading
import zipfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.caption_files import MAX_BYTES, SIDECARS, captions_beside
from mlcd.images.entries import Entry, constant
from mlcd.images.faults import raise_if_file_system_error
from mlcd.images.names import class_of_path, decode_path, encode_path, is_candidate, printable
from mlcd.images.sidecars import Spellings
from mlcd.images.source import FilesSource, ListingProblem


class ZipSource(FilesSource):
    """The members of zip files; the class is the sub-folder inside the archive."""

    def __init__(self, location: str, filesystem: Any, paths: list[str]) -> None:
        super().__init__(location, filesystem, paths)
        self._lock = threading.Lock()
        self._archives: dict[str, zipfile.ZipFile] = {}

    def entry_tables(self) -> Iterator[pa.Table]:
        for path, name in self._names_to_list():
            prefix = f"{name}/" if len(self.paths) > 1 else ""
            try:
                with self._filesystem.open(path, "rb") as raw, zipfile.ZipFile(raw) as archive:
                    members = [member for member in archive.infolist() if not member.is_dir()]
            except (
                OSError,
                ValueError,
                NotImplementedError,
                zipfile.BadZipFile,
            ) as error:  # ValueError: a name with a wrong encoding
                raise_if_file_system_error(path, error)
                self.problems.append(ListingProblem(name, "the zip file is damaged or cut short"))
                continue
            images = [member for member in members if is_candidate(PurePosixPath(member.filename))]
            images.sort(key=lambda member: member.filename)
            inner_paths = [PurePosixPath(member.filename) for member in images]
            yield pa.table(
                {
                    "key": [prefix + printable(inner.as_posix()) for inner in inner_paths],
                    "class_name": pa.array(map(class_of_path, inner_paths), pa.string()),
                    "size_bytes": [member.file_size for member in images],
                    "path": constant(encode_path(path), len(images)),
                    "member": pa.array([member.filename for member in images], pa.large_string()),
                }
            )

    def captions(self) -> Iterator[tuple[str, str]]:
        for path, entries in groupby(self.entries, lambda entry: decode_path(entry.locator[0])):
            with self._filesystem.open(path, "rb") as raw, zipfile.ZipFile(raw) as archive:
                names = Spellings(archive.namelist())
                for entry in entries:
                    stem = posixpath.splitext(entry.locator[1])[0]
                    for text in next(filter(None, _read_captions(archive, names, stem, path)), []):
                        yield entry.key, text

    def _read(self, entry: Entry) -> bytes:
        path, name = decode_path(entry.locator[0]), entry.locator[1]
        try:
            with self._lock:
                if path not in self._archives:
                    self._archives[path] = zipfile.ZipFile(self._filesystem.open(path, "rb"))
                return self._archives[path].read(name)
        # zlib, lzma, encryption and unknown methods each raise their own errors
        except Exception as error:
            raise ImageRejected("unreadable", "the member cannot be unpacked") from error


def _read_captions(
    archive: zipfile.ZipFile, names: Spellings, stem: str, path: str
) -> Iterator[list[str]]:
    """Yields the captions of each file beside an image."""
    for suffix in SIDECARS:
        if (name := names.find(stem + suffix)) is not None:
            item = f"{printable(path)}: {printable(stem)}"
            try:
                with archive.open(name) as file:
                    data = file.read(MAX_BYTES + 1)
            except Exception as error:  # any error of any method, as for an image
                raise InvalidInput(
                    f"{item}{suffix} cannot be unpacked", remedy="repair the zip file, or unpack it"
                ) from error
            yield captions_beside(suffix, data, item)
