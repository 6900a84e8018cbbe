"""Where images come from: a folder, tar shards, a parquet column or a zip, each as numbered (key, bytes).

Entries are in a stable order and are read one by one at random, so that work can start anywhere. Keys name
a sample for ever: the path inside a folder or zip, `shard/key` in a tar, `file/row` (or the `key` column) in
parquet. Class names are what the source itself says: the sub-folder, the `.cls` member, the `label` column.
"""

import errno
import hashlib
import os
import tarfile
import threading
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import PurePath, PurePosixPath
from typing import Any, Final, cast

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mlcd.errors import Conflict, ImageRejected, InvalidInput, MlcdError, NotFound, Unavailable
from mlcd.images.decode import DEFAULT_LIMITS
from mlcd.images.entries import Entries, Entry
from mlcd.images.shard_index import MEMBERS, Listing, file_state, list_once
from mlcd.types import SampleKey

# Files that stand beside images and are none; every other file is tried, and listed when it fails.
_SIDECARS: Final = frozenset(
    [
        ".txt",
        ".json",
        ".jsonl",
        ".csv",
        ".tsv",
        ".md",
        ".yaml",
        ".yml",
        ".xml",
        ".html",
        ".npy",
        ".npz",
        ".parquet",
        ".cls",
        ".pkl",
        ".py",
        ".db",
        ".ini",
        ".log",
        ".zip",
        ".tar",
    ]
)
_IMAGE_SUFFIXES: Final = frozenset(
    [".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif"]
)
_IMAGE_COLUMNS: Final = ("image", "jpg", "jpeg", "png", "webp", "bytes")
_TAR_BLOCK: Final = 512
_NO_FILE: Final = b""
"""In place of the path of what stands in a folder and is neither file nor folder."""
_NOWHERE: Final = -1
"""The offset of what stands among a shard's images and cannot be read as one."""
_BATCH_ROWS: Final = 64
_BUFFER_BYTES: Final = 1 << 20
_ROW_DIGITS: Final = 8
_ROWS: Final = pa.schema(
    [
        ("key", pa.large_string()),
        ("class_name", pa.string()),
        ("size_bytes", pa.int64()),
        ("group", pa.int32()),
        ("row", pa.int32()),
    ]
)
"""Of a parquet file; key: null where the row has none of its own."""
_CLASS_COLUMNS: Final = ("class_name", "label", "class", "cls")


@dataclass(frozen=True)
class Problem:
    """A whole shard, or a part of it, that could not be listed."""

    key: SampleKey
    detail: str


class Source(ABC):
    """A numbered set of images."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.problems: list[Problem] = []
        self.faults: list[SampleKey] = []
        """Images that the file system would not give, in the order of reading: theirs may not be the fault."""

    @cached_property
    def entries(self) -> Entries:
        """All images in a stable order.

        Raises InvalidInput when two share a key, Unavailable where a file system fails or refuses: what it holds would
        be missing without a word.
        """
        entries = Entries.of(self._list())
        if (key := entries.repeated_key()) is not None:
            raise InvalidInput(f"{self.location} has two images named {key}", remedy="make the names distinct")
        return entries

    def read(self, entry: Entry) -> bytes:
        """The encoded image; raises ImageRejected where it cannot be read. Safe to call from several threads."""
        if entry.size_bytes > DEFAULT_LIMITS.max_bytes:
            limit = DEFAULT_LIMITS.max_bytes
            raise ImageRejected("too-many-bytes", f"{entry.size_bytes} bytes, more than the limit of {limit}")
        try:
            return self._read(entry)
        except ImageRejected as rejection:
            if _is_fault(rejection.__cause__):
                self.faults.append(entry.key)
            raise

    @abstractmethod
    def _list(self) -> Iterator[pa.Table]:
        """Tables for `Entries.of`, one for each file or so, so that Python objects of a part only exist at a time."""

    @abstractmethod
    def _read(self, entry: Entry) -> bytes: ...

    @abstractmethod
    def files_of(self, entries: Entries) -> list[str]:
        """Paths of the files that hold these images; those that are not read are left out."""

    def check_unchanged(self, entries: Entries) -> None:
        """Raises Conflict naming the first file of these images that is not as it was listed."""
        name = next(self._changed(entries), None)
        if name is not None:
            raise Conflict(f"{name} of {self.location} has changed since it was listed", remedy="begin again")

    @abstractmethod
    def _changed(self, entries: Entries) -> Iterator[str]:
        """Names of the files of these images that are not as they were listed."""

    def check_not_empty(self) -> None:
        """Raises InvalidInput where there is no image, naming the first of what could not be listed."""
        if self.entries:
            return
        if self.problems:
            problem, more = self.problems[0], len(self.problems) - 1
            others = f", and {more} more" if more else ""
            raise InvalidInput(
                f"no image of {self.location} can be listed: {problem.key}: {problem.detail}{others}",
                remedy="restore the file, or give others",
            )
        raise InvalidInput(f"there are no images in {self.location}", remedy="is it the folder or shards you meant?")

    def listing_digest(self) -> str:
        """SHA-256 over keys and sizes: tells cheaply whether the source still holds the same files."""
        sha256 = hashlib.sha256()
        for key, size_bytes in zip(self.entries.keys(), self.entries.sizes_bytes(), strict=True):
            sha256.update(f"{key}\0{size_bytes}\0".encode())
        return sha256.hexdigest()


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
    kinds: dict[str, type[_FilesSource]] = {".tar": TarSource, ".parquet": ParquetSource, ".zip": ZipSource}
    if len(suffixes) == 1 and (kind := kinds.get(suffixes.pop())):
        return kind(location, filesystem, paths)
    raise InvalidInput(
        f"{location} is not a folder of images, .tar, .parquet or .zip",
        remedy="give one of these (one kind at a time)",
    )


class FolderSource(Source):
    """Every file below a folder, hidden files and sidecars apart; the class is the path of its sub-folder.

    Links and special files are listed, with no size, and not read: a link may lead anywhere, and a pipe ends nowhere.
    """

    def __init__(self, location: str, filesystem: Any, root: str) -> None:
        super().__init__(location)
        self._filesystem, self._root = filesystem, root.rstrip("/")

    def _list(self) -> Iterator[pa.Table]:
        folders = [self._list_folder(files) for files in self._walk()]
        if folders:
            table = pa.concat_tables(folders).sort_by("key")
            class_names = pc.struct_field(pc.extract_regex(table["key"], r"(?s)^(?P<parent>.*)/"), "parent")
            yield table.add_column(1, "class_name", class_names)

    def _walk(self) -> Iterator[list[dict[str, Any]]]:
        """What is in each folder. fsspec's own walk passes over folders that it cannot list."""
        folders = [self._root]
        while folders:
            folder = folders.pop()
            try:
                listed = self._filesystem.ls(folder, detail=True)
            except OSError as error:
                raise _unavailable(folder, error) from error
            inside = [info for info in listed if info["name"].rstrip("/") != folder]  # object stores list it in itself
            folders += [info["name"].rstrip("/") for info in inside if info["type"] == "directory"]
            yield inside

    def _list_folder(self, files: Iterable[dict[str, Any]]) -> pa.Table:
        """Without classes. path: where the name is not the key, as it is not valid UTF-8, or `_NO_FILE`."""
        keys, sizes, paths = [], [], []
        for info in files:
            name = info["name"][len(self._root) + 1 :]
            relative = PurePosixPath(name)
            if info["type"] != "directory" and is_candidate(relative):
                is_file = info["type"] == "file"
                keys.append(_printable(relative.as_posix()))
                sizes.append(int(info["size"]) if is_file else 0)
                paths.append(_NO_FILE if not is_file else None if name == keys[-1] else _encoded(name))
        return pa.table(
            {
                "key": pa.array(keys, pa.large_string()),
                "size_bytes": pa.array(sizes, pa.int64()),
                "path": pa.array(paths, pa.large_binary()),
            }
        )

    def _read(self, entry: Entry) -> bytes:
        if entry.locator == (_NO_FILE,):
            raise ImageRejected("unreadable", "a link or a special file: these are not followed")
        try:
            return cast(bytes, self._filesystem.cat_file(self._path(entry)))
        except (OSError, ValueError) as error:
            raise ImageRejected("unreadable", "the file cannot be read") from error

    def _path(self, entry: Entry) -> str:
        (path,) = entry.locator
        return f"{self._root}/{entry.key if path is None else _decoded(path)}"

    def files_of(self, entries: Entries) -> list[str]:
        return [self._path(entry) for entry in entries if entry.locator != (_NO_FILE,)]

    def _changed(self, entries: Entries) -> Iterator[str]:
        files = (entry for entry in entries if entry.locator != (_NO_FILE,))
        return (entry.key for entry in files if self._size(entry) != entry.size_bytes)

    def _size(self, entry: Entry) -> int | None:
        try:
            return int(self._filesystem.info(self._path(entry))["size"])
        except (OSError, ValueError):
            return None


class _FilesSource(Source):
    def __init__(self, location: str, filesystem: Any, paths: list[str]) -> None:
        super().__init__(location)
        self._filesystem, self._paths = filesystem, paths
        self._listed: dict[str, bytes | None] = {}

    def files_of(self, entries: Entries) -> list[str]:
        return list(dict.fromkeys(_decoded(entry.locator[0]) for entry in entries))

    def _changed(self, entries: Entries) -> Iterator[str]:
        return (path for path in self.files_of(entries) if file_state(self._filesystem, path) != self._listed[path])

    def _names(self) -> list[tuple[str, str]]:
        """(path, the part of the path that tells the files apart, without the suffix): before they are listed."""
        self._listed = {path: file_state(self._filesystem, path) for path in self._paths}
        parents = [PurePosixPath(path).parent.parts for path in self._paths]
        common = 0
        while all(len(parts) > common and parts[common] == parents[0][common] for parts in parents):
            common += 1
        return [
            (path, _printable(PurePosixPath(*PurePosixPath(path).parts[common:]).with_suffix("").as_posix()))
            for path in self._paths
        ]


class TarSource(_FilesSource):
    """Uncompressed tar shards in webdataset layout; members are read by offset, without unpacking."""

    def _list(self) -> Iterator[pa.Table]:
        for path, shard in self._names():
            listing = list_once(self._filesystem, path, partial(self._list_members, path))
            if listing.damaged:
                self.problems.append(Problem(shard, "the shard is damaged, cut short or compressed; read up to there"))
            members = listing.members
            yield pa.table(
                {
                    "key": pc.binary_join_element_wise(shard, members["name"], "/"),
                    "class_name": members["class_name"],
                    "size_bytes": members["size_bytes"],
                    "path": _constant(_encoded(path), len(members)),
                    "offset": members["offset"],
                }
            )

    def _list_members(self, path: str) -> Listing:
        names: list[PurePosixPath] = []
        offsets: list[int] = []
        sizes: list[int] = []
        class_of: dict[str, str] = {}
        target_of: dict[int, PurePosixPath] = {}
        damaged = False
        try:
            with self._filesystem.open(path, "rb") as raw, tarfile.open(fileobj=raw, mode="r:") as archive:
                for member in archive:
                    archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all, a kilobyte each
                    name = PurePosixPath(member.name)
                    if member.isreg() and name.suffix == ".cls" and (text := archive.extractfile(member)):
                        class_of[_sample(name)] = text.read(256).decode("utf-8", "replace").strip()
                    elif not member.isdir() and is_candidate(name):
                        is_read = member.isreg() and ".." not in name.parts
                        names.append(name)
                        offsets.append(member.offset_data if is_read else _NOWHERE)
                        sizes.append(member.size if is_read else 0)
                        if member.islnk():
                            target_of[len(names) - 1] = PurePosixPath(member.linkname)
                # tarfile takes anything that is no header for the end; only zeros are.
                raw.seek(archive.offset)
                damaged = raw.read(_TAR_BLOCK) != bytes(_TAR_BLOCK)
        except (OSError, tarfile.TarError, EOFError) as error:
            _refuse_fault(path, error)
            damaged = True
        if target_of:  # GNU tar writes all but the first of a file's names as hard links to it
            place_of = {name: place for place, name in enumerate(names) if place not in target_of}
            for place, target in target_of.items():
                if (first := place_of.get(target)) is not None:
                    offsets[place], sizes[place] = offsets[first], sizes[first]
        samples = [_sample(name) for name in names]
        num_images = Counter(samples)
        keys = [
            _printable(sample if num_images[sample] == 1 else name.as_posix())
            for sample, name in zip(samples, names, strict=True)
        ]
        class_names = [class_of.get(sample) for sample in samples]
        return Listing(pa.table([keys, class_names, offsets, sizes], schema=MEMBERS), damaged)

    def _read(self, entry: Entry) -> bytes:
        path, offset = entry.locator
        if offset == _NOWHERE:
            raise ImageRejected("unreadable", "a symbolic link, a device or a name that leads out of the archive")
        try:
            data = cast(bytes, self._filesystem.cat_file(_decoded(path), start=offset, end=offset + entry.size_bytes))
        except OSError as error:
            raise ImageRejected("unreadable", "the shard cannot be read") from error
        if len(data) != entry.size_bytes:
            raise ImageRejected("unreadable", "the shard ends inside this image")
        return data


class ZipSource(_FilesSource):
    """Members of zip files; the class is the sub-folder inside the archive."""

    def __init__(self, location: str, filesystem: Any, paths: list[str]) -> None:
        super().__init__(location, filesystem, paths)
        self._lock = threading.Lock()
        self._archives: dict[str, zipfile.ZipFile] = {}

    def _list(self) -> Iterator[pa.Table]:
        for path, name in self._names():
            prefix = f"{name}/" if len(self._paths) > 1 else ""
            try:
                with self._filesystem.open(path, "rb") as raw, zipfile.ZipFile(raw) as archive:
                    members = [member for member in archive.infolist() if not member.is_dir()]
            except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:  # ValueError: an encoding
                _refuse_fault(path, error)
                self.problems.append(Problem(name, "the zip file is damaged or cut short"))
                continue
            images = [member for member in members if is_candidate(PurePosixPath(member.filename))]
            images.sort(key=lambda member: member.filename)
            relative = [PurePosixPath(member.filename) for member in images]
            yield pa.table(
                {
                    "key": [prefix + _printable(each.as_posix()) for each in relative],
                    "class_name": pa.array([_folder(each) for each in relative], pa.string()),
                    "size_bytes": [member.file_size for member in images],
                    "path": _constant(_encoded(path), len(images)),
                    "member": pa.array([member.filename for member in images], pa.large_string()),
                }
            )

    def _read(self, entry: Entry) -> bytes:
        path, name = _decoded(entry.locator[0]), entry.locator[1]
        try:
            with self._lock:
                if path not in self._archives:
                    self._archives[path] = zipfile.ZipFile(self._filesystem.open(path, "rb"))
                return self._archives[path].read(name)
        except Exception as error:  # zlib, lzma, encryption, unknown methods: each has its own
            raise ImageRejected("unreadable", "the member cannot be unpacked") from error


class ParquetSource(_FilesSource):
    """A binary image column (or a struct with `bytes`, as Hugging Face writes it); one row group in memory."""

    def __init__(self, location: str, filesystem: Any, paths: list[str]) -> None:
        super().__init__(location, filesystem, paths)
        self._lock = threading.Lock()
        self._group: tuple[tuple[str, int], Any] | None = None

    def _list(self) -> Iterator[pa.Table]:
        for path, name in self._names():
            listing = list_once(self._filesystem, path, partial(self._list_rows, path))
            if listing.damaged:
                self.problems.append(Problem(name, "the parquet file is damaged or cut short"))
                continue
            rows = listing.members
            numbers = pc.utf8_lpad(pa.array(np.arange(len(rows))).cast(pa.string()), _ROW_DIGITS, padding="0")
            yield pa.table(
                {
                    "key": pc.coalesce(rows["key"], pc.binary_join_element_wise(name, numbers, "/")),
                    "class_name": rows["class_name"],
                    "size_bytes": rows["size_bytes"],
                    "path": _constant(_encoded(path), len(rows)),
                    "group": rows["group"],
                    "row": rows["row"],
                }
            )

    def _list_rows(self, path: str) -> Listing:
        """The sizes belong to what tells whether a file is the same, and stand nowhere but beside the images: all of
        these are read, a few at a time.
        """
        try:
            with self._filesystem.open(path, "rb") as raw:
                file = pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES)  # else a column's whole group is in memory
                batches = [_listed_batch(*place) for place in _batches(file, path)]
        except (OSError, pa.ArrowException) as error:
            _refuse_fault(path, error)
            return Listing(_ROWS.empty_table(), damaged=True)
        return Listing(pa.Table.from_batches(batches, schema=_ROWS), damaged=False)

    def _read(self, entry: Entry) -> bytes:
        path, (group, row) = _decoded(entry.locator[0]), entry.locator[1:]
        with self._lock:
            if self._group is None or self._group[0] != (path, group):
                self._group = None  # before the next one is in memory
                try:
                    with self._filesystem.open(path, "rb") as raw:
                        file = pq.ParquetFile(raw)
                        column = file.read_row_group(group, columns=[_image_column(file, path)]).column(0)
                except (OSError, pa.ArrowException) as error:
                    raise ImageRejected("unreadable", "the row group cannot be read") from error
                self._group = ((path, group), _image_bytes(column))
            return self._group[1][row].as_py() or b""


def _batches(file: Any, path: str) -> Iterator[tuple[int, int, Any, Any, Any]]:
    """(row group, first row in it, images, keys, class names) of a few rows each; None for what the file has not."""
    columns = file.schema_arrow.names
    image = _image_column(file, path)
    key = "key" if "key" in columns else None
    class_name = next((column for column in _CLASS_COLUMNS if column in columns), None)
    wanted = [column for column in (image, key, class_name) if column is not None]
    for group in range(file.num_row_groups):
        start = 0
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=wanted, use_threads=False):
            named = [None if column is None else batch.column(column) for column in (key, class_name)]
            yield group, start, batch.column(image), *named
            start += batch.num_rows


def _listed_batch(group: int, start: int, images: Any, keys: Any, class_names: Any) -> pa.RecordBatch:
    num = len(images)
    return pa.record_batch(
        [
            pa.array([text or None for text in _texts(keys, num)], pa.large_string()),
            pa.array(_texts(class_names, num), pa.string()),
            pc.fill_null(pc.binary_length(_image_bytes(images)), 0).cast(pa.int64()),
            pa.array(np.full(num, group), pa.int32()),
            pa.array(np.arange(start, start + num), pa.int32()),
        ],
        schema=_ROWS,
    )


def _image_column(file: Any, path: str) -> str:
    column = next((column for column in _IMAGE_COLUMNS if column in file.schema_arrow.names), None)
    if column is None:
        raise InvalidInput(
            f"{_printable(path)} has no image column", remedy=f"name it one of {', '.join(_IMAGE_COLUMNS)}"
        )
    return column


def _texts(values: Any, num: int) -> list[str | None]:
    return [None if value is None else str(value) for value in ([None] * num if values is None else values.to_pylist())]


def _image_bytes(column: Any) -> Any:
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = pc.struct_field(column, "bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise InvalidInput(f"the image column holds {column.type}", remedy="it must hold the encoded files, as binary")
    return column


def _is_fault(error: BaseException | None) -> bool:
    """Whether the file system failed or refused.

    What is wrong in a file is said without a number, or with that of a place in it that cannot be.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def _refuse_fault(path: str, error: Exception) -> None:
    if _is_fault(error):
        raise _unavailable(path, error) from error


def _unavailable(path: str, error: Exception) -> Unavailable:
    number = getattr(error, "errno", None)
    reason = os.strerror(number).lower() if number else "its file system does not answer"
    return Unavailable(
        f"{_printable(path)} cannot be read: {reason}", remedy="mend that, or leave it out, and run the same again"
    )


def is_candidate(path: PurePath) -> bool:
    """Whether a file at this path below a folder is taken for an image: hidden files and sidecars are not."""
    hidden = any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in path.parts)
    return not hidden and path.suffix.lower() not in _SIDECARS


def _sample(name: PurePosixPath) -> str:
    """Webdataset's key: the path up to the first dot of its last part."""
    return (name.parent / name.name.split(".", 1)[0]).as_posix()


def _printable(name: str) -> str:
    """Names that are not valid UTF-8 still become unique, storable keys."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _folder(relative: PurePosixPath) -> str | None:
    """The class that a path states."""
    parent = relative.parent.as_posix()
    return None if parent == "." else _printable(parent)


def _encoded(path: str) -> bytes:
    """File names need not be valid UTF-8, and columns of text must be."""
    return path.encode("utf-8", "surrogateescape")


def _decoded(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def _constant(value: bytes, num: int) -> pa.DictionaryArray:
    """The same value in `num` rows, in a byte each."""
    return pa.DictionaryArray.from_arrays(np.zeros(num, dtype=np.int8), pa.array([value], pa.binary()))
