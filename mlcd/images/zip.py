"""The source that reads zip files."""

import threading
import zipfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from mlcd.errors import ImageRejected
from mlcd.images.entries import Entry, constant
from mlcd.images.faults import refuse_fault
from mlcd.images.names import class_of_path, decoded, encoded, is_candidate, printable
from mlcd.images.source import FilesSource, ListingProblem


class ZipSource(FilesSource):
    """The members of zip files; the class is the sub-folder inside the archive."""

    def __init__(self, location: str, filesystem: Any, paths: list[str]) -> None:
        super().__init__(location, filesystem, paths)
        self._lock = threading.Lock()
        self._archives: dict[str, zipfile.ZipFile] = {}

    def _list(self) -> Iterator[pa.Table]:
        for path, name in self._names():
            prefix = f"{name}/" if len(self.paths) > 1 else ""
            try:
                with self._filesystem.open(path, "rb") as raw, zipfile.ZipFile(raw) as archive:
                    members = [member for member in archive.infolist() if not member.is_dir()]
            except (
                OSError,
                ValueError,
                NotImplementedError,
                zipfile.BadZipFile,
            ) as error:  # ValueError: a bad encoding
                refuse_fault(path, error)
                self.problems.append(ListingProblem(name, "the zip file is damaged or cut short"))
                continue
            images = [member for member in members if is_candidate(PurePosixPath(member.filename))]
            images.sort(key=lambda member: member.filename)
            relative = [PurePosixPath(member.filename) for member in images]
            yield pa.table(
                {
                    "key": [prefix + printable(each.as_posix()) for each in relative],
                    "class_name": pa.array([class_of_path(each) for each in relative], pa.string()),
                    "size_bytes": [member.file_size for member in images],
                    "path": constant(encoded(path), len(images)),
                    "member": pa.array([member.filename for member in images], pa.large_string()),
                }
            )

    def _read(self, entry: Entry) -> bytes:
        path, name = decoded(entry.locator[0]), entry.locator[1]
        try:
            with self._lock:
                if path not in self._archives:
                    self._archives[path] = zipfile.ZipFile(self._filesystem.open(path, "rb"))
                return self._archives[path].read(name)
        # zlib, lzma, encryption and unknown methods each have their own errors
        except Exception as error:
            raise ImageRejected("unreadable", "the member cannot be unpacked") from error
