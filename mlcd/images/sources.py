"""The opening of a source: a folder or some of its files, tar shards, a parquet column or a zip,
each as numbered (key, bytes).

Entries are in a stable order and are read one by one in any order, so that work can start anywhere.
Keys name a sample for ever: the path inside a folder or zip, `shard/key` in a tar, `file/row` (or
the `key` column) in parquet. Class names are what the source itself states: the sub-folder, the
`.cls` member, the `label` column.
"""

import posixpath
from pathlib import PurePosixPath
from typing import Any, Final

import fsspec

from mlcd.errors import InvalidInput, MlcdError, NotFound
from mlcd.images.arrow import find_saved
from mlcd.images.dataset_parts import part_of_files
from mlcd.images.faults import unavailable
from mlcd.images.folder import FolderSource, NamedFilesSource
from mlcd.images.names import decoded, is_candidate, printable
from mlcd.images.parquet import ParquetSource
from mlcd.images.source import FilesSource, Source
from mlcd.images.tar import TarSource
from mlcd.images.zip import ZipSource
from mlcd.locations import check_no_credentials, package_for

_ARCHIVES: Final[dict[str, type[FilesSource]]] = {
    ".tar": TarSource,
    ".parquet": ParquetSource,
    ".zip": ZipSource,
}
_LIST: Final = ".txt"
_WILDCARDS: Final = "*?["
_FORMS: Final = "give a folder, image files, tar shards, parquet or zip"
_IMAGE_SUFFIXES: Final = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".png",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".avif",
    ]
)


def open_source(location: str) -> Source:
    """Opens the source at a folder, file, glob of these, list of files, or an fsspec URL.

    A folder that holds tar shards or parquet files and no image, at any depth, is read as these. A
    dataset that Hugging Face's `save_to_disk` wrote is read as such. A list is a .txt file with the
    name of a file in each line, relative to the list's folder and not outside of it. Raises
    NotFound, InvalidInput.
    """
    if not location:
        raise NotFound("no images are named", remedy=_FORMS)
    check_no_credentials(location)
    try:
        return _open(location)
    except MlcdError:
        raise
    except ImportError as error:
        raise InvalidInput(
            f"{location} needs a package that is not installed",
            remedy=f"pip install {package_for(location)}",
        ) from error
    except Exception as error:  # each file system behind a URL has its own errors
        raise InvalidInput(
            f"{location} is not a place that can be read ({type(error).__name__})",
            remedy="give a path or a known URL, and the rights that it asks for",
        ) from error


def _open(location: str) -> Source:
    filesystem, path = fsspec.core.url_to_fs(location)
    if any(character in path for character in _WILDCARDS) and not filesystem.exists(path):
        return _open_files(
            location,
            filesystem,
            _fixed_part(path),
            list(filesystem.glob(path, detail=True).values()),
        )
    if filesystem.isdir(path):
        return _open_folder(location, filesystem, path)
    if not filesystem.isfile(path):
        raise NotFound(f"there are no images at {location}", remedy=_FORMS)
    folder = posixpath.dirname(path)
    if _suffix(path) == _LIST:
        return _open_files(location, filesystem, folder, _listed(location, filesystem, path))
    if _suffix(path) not in _IMAGE_SUFFIXES and _suffix(path) not in _ARCHIVES:
        raise InvalidInput(
            f"{location} is not an image, .tar, .parquet, .zip or a list of files", remedy=_FORMS
        )
    return _open_files(location, filesystem, folder, [_described(filesystem, path)])


def _open_folder(location: str, filesystem: Any, path: str) -> Source:
    if (saved := find_saved(location, filesystem, path)) is not None:
        return saved
    shards = sorted(name for name in filesystem.ls(path, detail=False) if name.endswith(".tar"))
    tables = [] if shards else _tables(filesystem, path)
    if (shards or tables) and not any(
        _suffix(name) in _IMAGE_SUFFIXES for name in filesystem.find(path)
    ):
        if shards:
            return TarSource(location, filesystem, shards)
        return ParquetSource(location, filesystem, tables, part_of_files(tables))
    return FolderSource(location, filesystem, path)


def _tables(filesystem: Any, path: str) -> list[str]:
    """Returns the parquet files in a folder, or in its only sub-folder, as the hub's repositories
    have them.
    """
    inside = filesystem.ls(path, detail=True)
    folders = [info["name"] for info in inside if info["type"] == "directory"]
    shown = [name for name in folders if not posixpath.basename(name).startswith(".")]
    names = [info["name"] for info in inside]
    if len(shown) == 1 and not any(_suffix(name) == ".parquet" for name in names):
        try:
            names = filesystem.ls(shown[0], detail=False)
        except OSError as error:
            raise unavailable(shown[0], error) from error
    return sorted(name for name in names if _suffix(name) == ".parquet")


def _open_files(location: str, filesystem: Any, root: str, files: list[dict[str, Any]]) -> Source:
    """Opens a source of these files: all archives of one kind, or all image files below `root`."""
    if not files:
        raise NotFound(f"there are no images at {location}", remedy=_FORMS)
    files.sort(key=lambda info: str(info["name"]))
    suffixes = {_suffix(info["name"]) for info in files}
    if suffixes.isdisjoint(_ARCHIVES):
        folder = next((info["name"] for info in files if info["type"] == "directory"), None)
        if folder is not None:
            raise InvalidInput(
                f"{location} names a folder, {printable(folder)}",
                remedy="give one folder, or name files only, as FOLDER/*.jpg or FOLDER/**/*.jpg",
            )
        if not any(is_candidate(PurePosixPath(info["name"]).relative_to(root)) for info in files):
            raise InvalidInput(f"no file of {location} is an image", remedy=_FORMS)
        return NamedFilesSource(location, filesystem, root, files)
    if len(suffixes) > 1:
        raise InvalidInput(
            f"{location} names files of several kinds", remedy=f"{_FORMS} (one kind at a time)"
        )
    return _ARCHIVES[suffixes.pop()](location, filesystem, [info["name"] for info in files])


def _fixed_part(pattern: str) -> str:
    """Returns the folder before the first part with a wildcard, to which keys are relative."""
    parts = pattern.split("/")
    first = next(
        index
        for index, part in enumerate(parts)
        if any(character in part for character in _WILDCARDS)
    )
    return "/".join(parts[:first])


def _listed(location: str, filesystem: Any, path: str) -> list[dict[str, Any]]:
    """Returns the files that the list at `path` names. Raises InvalidInput for one outside the
    list's folder.
    """
    folder, files = posixpath.dirname(path), {}
    for line in filter(None, decoded(filesystem.cat_file(path)).splitlines()):
        name = posixpath.normpath(posixpath.join(folder, line))
        if not name.startswith(f"{folder}/"):
            raise InvalidInput(
                f"{location} names {printable(line)[:80]}, outside of its folder",
                remedy="put the list into a folder that holds all of its files",
            )
        try:
            files[name] = _described(filesystem, name)
        except OSError as error:
            raise InvalidInput(
                f"{location} names {printable(line)[:80]}, which is not there",
                remedy="it is to hold a file's name in each line, relative to its folder",
            ) from error
    return list(files.values())


def _described(filesystem: Any, path: str) -> dict[str, Any]:
    """Describes a file as a folder's listing does, in which a link does not count as a file."""
    info: dict[str, Any] = filesystem.info(path)
    return {**info, "type": "link"} if info.get("islink") else info


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()
