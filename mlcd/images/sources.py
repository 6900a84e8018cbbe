"""Opens a source of images: a folder or some of its files, tar shards, a parquet column or a zip.

Entries are in a stable order and can be read in any order, so that work can resume anywhere. Keys
name a sample permanently: the path inside a folder or zip, `shard/key` in a tar, `file/row` (or the
`key` column) in parquet. Class names come from the source: the sub-folder, the `.cls` member, the
`label` column.
"""

import posixpath
from pathlib import PurePosixPath
from typing import Any, Final

import fsspec

from mlcd.errors import InvalidInput, MlcdError, NotFound
from mlcd.extras import install_command_for, missing_package
from mlcd.fetching.url_options import UrlOptions
from mlcd.images.arrow import find_saved
from mlcd.images.dataset_parts import part_of_files
from mlcd.images.faults import raise_if_file_system_error, unavailable
from mlcd.images.folder import FolderSource, NamedFilesSource
from mlcd.images.image_columns import ColumnsSource
from mlcd.images.lists import (
    UrlListSource,
    describe_file,
    files_below,
    files_of_a_store,
    is_web,
    read_lines,
)
from mlcd.images.names import is_candidate, printable
from mlcd.images.parquet import ParquetSource
from mlcd.images.source import FilesSource, Source
from mlcd.images.tar import TarSource
from mlcd.images.zip import ZipSource
from mlcd.locations import check_no_credentials, install_command_for_url, is_url
from mlcd.store_errors import translate_error

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
        ".heic",
        ".heif",
        ".hif",
    ]
)


def open_source(location: str, *, urls: UrlOptions | None = None) -> Source:
    """Opens the source at a folder, file, glob, list of files, or fsspec URL.

    A folder with tar shards or parquet files is read as shards or tables if it lacks images, at
    any depth. A folder of Hugging Face's `save_to_disk` is read as a dataset. A list is a .txt file
    with one file name per line, relative to the list's folder and inside it.

    urls: options for fetching lists and columns of URLs; None refuses them. Raises NotFound and
    InvalidInput.
    """
    if not location:
        raise NotFound("the location of the images is empty", remedy=_FORMS)
    check_no_credentials(location)
    try:
        source = _open(location, urls)
    except MlcdError:
        raise
    except ImportError as error:
        raise InvalidInput(
            f"{location} needs a package that is not installed",
            remedy=install_command_for_url(location),
        ) from error
    except Exception as error:  # each file system of fsspec has its own errors
        if is_url(location) and not isinstance(error, ValueError):
            raise translate_error(location, error) from error
        raise_if_file_system_error(location, error)
        raise InvalidInput(
            f"{location} cannot be read as a path or URL ({type(error).__name__})",
            remedy="give a path or a supported URL, and the credentials that it needs",
        ) from error
    if urls is None or urls.column is None:
        return source
    if not isinstance(source, ColumnsSource):
        raise InvalidInput(
            f"--url-column is for parquet and saved datasets, got {location}",
            remedy="omit --url-column",
        )
    source.use_url_column(urls.column)
    return _fetch_urls(source, urls)


def _open(location: str, urls: UrlOptions | None) -> Source:
    filesystem, path = fsspec.core.url_to_fs(location)
    if not path:
        raise InvalidInput(
            f"the URL must name a bucket, got {location}", remedy="write s3://bucket/folder"
        )
    if any(character in path for character in _WILDCARDS) and not filesystem.exists(path):
        return _open_files(
            location,
            filesystem,
            _before_wildcard(path),
            list(filesystem.glob(path, detail=True).values()),
        )
    if filesystem.isdir(path):
        return _open_folder(location, filesystem, path)
    if not filesystem.isfile(path):
        remedy = "check the bucket and the name" if is_url(location) else _FORMS
        raise NotFound(f"no images at {location}", remedy=remedy)
    folder = posixpath.dirname(path)
    if _suffix(path) == _LIST:
        return _open_list(location, filesystem, path, urls)
    if _suffix(path) not in _IMAGE_SUFFIXES and _suffix(path) not in _ARCHIVES:
        raise InvalidInput(
            f"the input must be an image, .tar, .parquet, .zip or a list of files, got {location}",
            remedy=_FORMS,
        )
    return _open_files(location, filesystem, folder, [describe_file(filesystem, path)])


def _open_folder(location: str, filesystem: Any, path: str) -> Source:
    if (saved_dataset := find_saved(location, filesystem, path)) is not None:
        return saved_dataset
    shards = sorted(name for name in filesystem.ls(path, detail=False) if name.endswith(".tar"))
    tables = [] if shards else _list_tables(filesystem, path)
    if (shards or tables) and not any(
        _suffix(name) in _IMAGE_SUFFIXES for name in filesystem.find(path)
    ):
        if shards:
            return TarSource(location, filesystem, shards)
        return ParquetSource(location, filesystem, tables, part_of_files(tables))
    return FolderSource(location, filesystem, path)


def _list_tables(filesystem: Any, path: str) -> list[str]:
    """Returns the parquet files in a folder, or in its only sub-folder, as in repositories of the
    hub.
    """
    infos = filesystem.ls(path, detail=True)
    folders = [info["name"] for info in infos if info["type"] == "directory"]
    visible = [name for name in folders if not posixpath.basename(name).startswith(".")]
    names = [info["name"] for info in infos]
    if len(visible) == 1 and not any(_suffix(name) == ".parquet" for name in names):
        try:
            names = filesystem.ls(visible[0], detail=False)
        except OSError as error:
            raise unavailable(visible[0], error) from error
    return sorted(name for name in names if _suffix(name) == ".parquet")


def _open_files(location: str, filesystem: Any, root: str, files: list[dict[str, Any]]) -> Source:
    """Opens a source of the files: archives of one kind, or image files below `root`."""
    if not files:
        raise NotFound(f"no images at {location}", remedy=_FORMS)
    files.sort(key=lambda info: str(info["name"]))
    suffixes = {_suffix(info["name"]) for info in files}
    if suffixes.isdisjoint(_ARCHIVES):
        folder = next((info["name"] for info in files if info["type"] == "directory"), None)
        if folder is not None:
            raise InvalidInput(
                f"{location} names a folder, {printable(folder)}",
                remedy="give one folder, or only files, as FOLDER/*.jpg or FOLDER/**/*.jpg",
            )
        if not any(is_candidate(PurePosixPath(info["name"]).relative_to(root)) for info in files):
            raise InvalidInput(f"{location} must name images, found none", remedy=_FORMS)
        return NamedFilesSource(location, filesystem, root, files)
    if len(suffixes) > 1:
        raise InvalidInput(
            f"{location} must name files of one kind, got {', '.join(sorted(suffixes))}",
            remedy=_FORMS,
        )
    return _ARCHIVES[suffixes.pop()](location, filesystem, [info["name"] for info in files])


def _open_list(location: str, filesystem: Any, path: str, urls: UrlOptions | None) -> Source:
    lines = read_lines(filesystem, path)
    num_web, num_urls = sum(map(is_web, lines)), sum(map(is_url, lines))
    if num_urls not in (0, len(lines)) or num_web not in (0, num_urls):
        raise InvalidInput(
            f"{location} must name only local files, only URLs of a store or only web URLs",
            remedy="make a separate list for each",
        )
    if num_urls and urls is None:
        raise InvalidInput(
            f"{location} names URLs, which this command does not fetch",
            remedy="fetch them with `mlcd embed` or `mlcd label`, and give their output",
        )
    if num_web and urls is not None:
        return _fetch_urls(UrlListSource(location, filesystem, [path]), urls)
    if num_urls:
        return _open_files(location, *files_of_a_store(location, lines))
    folder = posixpath.dirname(path)
    return _open_files(location, filesystem, folder, files_below(location, filesystem, path, lines))


def _fetch_urls(links: Source, urls: UrlOptions) -> Source:
    """Returns the source of the images at the URLs in `links`."""
    try:
        from mlcd.images.url_source import UrlSource
    except ImportError as error:
        package = missing_package(error)
        raise InvalidInput(
            f"the URLs in {links.location} need the package {package}, which is not installed",
            remedy=install_command_for(package, likely="urls"),
        ) from error
    return UrlSource(links, urls)


def _before_wildcard(pattern: str) -> str:
    """Returns the folder before the first part with a wildcard; keys are relative to it."""
    parts = pattern.split("/")
    num_plain = next(
        index
        for index, part in enumerate(parts)
        if any(character in part for character in _WILDCARDS)
    )
    return "/".join(parts[:num_plain])


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()
