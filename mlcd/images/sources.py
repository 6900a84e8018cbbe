"""Where images come from: a folder, tar shards, a parquet column or a zip, each as numbered (key, bytes).

Entries are in a stable order and are read one by one at random, so that work can start anywhere. Keys name
a sample for ever: the path inside a folder or zip, `shard/key` in a tar, `file/row` (or the `key` column) in
parquet. Class names are what the source itself says: the sub-folder, the `.cls` member, the `label` column.
"""

from pathlib import PurePosixPath
from typing import Final

import fsspec

from mlcd.errors import InvalidInput, MlcdError, NotFound
from mlcd.images.folder import FolderSource
from mlcd.images.parquet import ParquetSource
from mlcd.images.source import FilesSource, Source
from mlcd.images.tar import TarSource
from mlcd.images.zip import ZipSource

_IMAGE_SUFFIXES: Final = frozenset(
    [".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif"]
)


def open_source(location: str) -> Source:
    """The source at a folder, file, glob of these, or an fsspec URL; raises NotFound, InvalidInput.

    A folder that holds tar shards and no image, at any depth, is read as its shards.
    """
    if not location:
        raise NotFound("no images are named", remedy="give a folder, tar shards, parquet or zip")
    try:
        return _open(location)
    except MlcdError:
        raise
    except Exception as error:  # each file system behind a URL has errors of its own
        raise InvalidInput(
            f"{location} is not a place that can be read", remedy="give a path or a known URL"
        ) from error


def _open(location: str) -> Source:
    filesystem, path = fsspec.core.url_to_fs(location)
    if any(character in path for character in "*?[") and not filesystem.exists(path):
        paths = sorted(filesystem.glob(path))
    elif filesystem.isdir(path):
        paths = sorted(name for name in filesystem.ls(path, detail=False) if name.endswith(".tar"))
        if not paths or any(PurePosixPath(name).suffix.lower() in _IMAGE_SUFFIXES for name in filesystem.find(path)):
            return FolderSource(location, filesystem, path)
    else:
        paths = [path] if filesystem.isfile(path) else []
    if not paths:
        raise NotFound(f"there are no images at {location}", remedy="give a folder, tar shards, parquet or zip")
    suffixes = {PurePosixPath(name).suffix.lower() for name in paths}
    kinds: dict[str, type[FilesSource]] = {".tar": TarSource, ".parquet": ParquetSource, ".zip": ZipSource}
    if len(suffixes) == 1 and (kind := kinds.get(suffixes.pop())):
        return kind(location, filesystem, paths)
    raise InvalidInput(
        f"{location} is not a folder of images, .tar, .parquet or .zip",
        remedy="give one of these (one kind at a time)",
    )
