"""Lists: text files with a file name or a URL per line."""

import posixpath
from collections.abc import Iterator, Sequence
from typing import Any, Final

import fsspec
import pyarrow as pa

from mlcd.errors import InvalidInput
from mlcd.images.entries import Entry, constant
from mlcd.images.names import encode_path, printable
from mlcd.images.remote_files import name_for_people, threads
from mlcd.images.source import FilesSource
from mlcd.locations import check_no_credentials
from mlcd.store_errors import translate_error
from mlcd.text_tables import read_list

_WEB: Final = ("http://", "https://")
_LINE_DIGITS: Final = 8
_PARALLEL_LOOKUPS: Final = 16  # concurrent requests to a store for descriptions of files


def read_lines(filesystem: Any, path: str) -> list[str]:
    """Returns the non-empty lines of a list."""
    return list(filter(None, read_list(filesystem.cat_file(path), printable(path))))


def is_web(line: str) -> bool:
    """Tells whether a line is a web URL, not the URL of a store."""
    return line.lower().startswith(_WEB)


class UrlListSource(FilesSource):
    """The URLs in a list, in place of images. A key is the list's name with the line number."""

    def entry_tables(self) -> Iterator[pa.Table]:
        for path, name in self._names_to_list():
            lines = read_list(self._filesystem.cat_file(path), printable(path))
            numbered = [(number, line) for number, line in enumerate(lines, 1) if line]
            yield pa.table(
                {
                    "key": [f"{name}/{number:0{_LINE_DIGITS}}" for number, _ in numbered],
                    "class_name": pa.nulls(len(numbered), pa.string()),
                    "size_bytes": [len(encode_path(line)) for _, line in numbered],
                    "path": constant(encode_path(path), len(numbered)),
                    "url": pa.array([encode_path(line) for _, line in numbered], pa.binary()),
                }
            )

    def _read(self, entry: Entry) -> bytes:
        url: bytes = entry.locator[1]
        return url

    def captions(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def files_of(self, entries: Sequence[Entry]) -> list[str]:
        return self.paths if len(entries) else []


def files_below(
    location: str, filesystem: Any, path: str, lines: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the file system's descriptions of the files in the list at `path`.

    Raises InvalidInput for a missing file and for a file outside the list's folder.
    """
    folder, files = posixpath.dirname(path), {}
    for line in lines:
        name = posixpath.normpath(posixpath.join(folder, line))
        if not name.startswith(f"{folder}/"):
            raise InvalidInput(
                f"{location} names {printable(line)[:80]}, outside of its folder",
                remedy="move the list into a folder that contains all of its files",
            )
        try:
            files[name] = describe_file(filesystem, name)
        except OSError as error:
            raise InvalidInput(
                f"{location} names {printable(line)[:80]}, which does not exist",
                remedy="each line must be a file name, relative to the list's folder",
            ) from error
    return list(files.values())


def files_of_a_store(location: str, lines: Sequence[str]) -> tuple[Any, str, list[dict[str, Any]]]:
    """Returns the common file system and folder of the URLs in `lines`, and the described files.

    Raises InvalidInput for URLs of several stores or buckets, and MlcdError naming a file that
    cannot be read.
    """
    stores = {check_no_credentials(line).partition("://")[0] for line in lines}
    filesystem, _ = fsspec.core.url_to_fs(lines[0])
    paths = list(dict.fromkeys(map(filesystem._strip_protocol, lines)))  # noqa: SLF001 - not public
    folder = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    if len(stores) > 1 or not folder:
        raise InvalidInput(
            f"{location} must name files of one bucket", remedy="make a list for each bucket"
        )

    def info(path: str) -> dict[str, Any]:
        try:
            return describe_file(filesystem, path)
        except Exception as error:  # each file system has its own errors
            raise translate_error(name_for_people(filesystem, path), error) from error

    with threads(_PARALLEL_LOOKUPS) as pool:
        return filesystem, folder, list(pool.map(info, paths))


def describe_file(filesystem: Any, path: str) -> dict[str, Any]:
    """Describes a file as a folder's listing does, where a link has the type `link`."""
    info: dict[str, Any] = filesystem.info(path)
    return {**info, "type": "link"} if info.get("islink") else info
