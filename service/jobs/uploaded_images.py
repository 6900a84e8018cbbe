"""Checks of uploaded images: one image, or a zip, tar or parquet file of many.

An archive is never unpacked to a disk, so the checks bound the work of those who read it: the
number of its entries, the bytes that they unpack to, and the memory that its directory takes.
"""

import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, BinaryIO, Final, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.errors import InvalidInput
from mlcd.images.decode import format_of
from mlcd.images.names import printable

if TYPE_CHECKING:  # imports the readers of all sources, which servers need for uploads alone
    from mlcd.images.source import Source

_IMAGES_REMEDY: Final = "send one image, or a zip, tar or parquet file of images"
_MAX_RATIO: Final = 100  # of unpacked to packed bytes, for more than _FREE_BYTES unpacked bytes
_FREE_BYTES: Final = 100 * 2**20
_DIRECTORY_BYTES: Final = 256  # of a zip's directory or a parquet file's footer, per entry
_BASE_DIRECTORY_BYTES: Final = 2**20  # for any number of entries
_HEAD_BYTES: Final = 512
_TAR_MAGIC: Final = slice(257, 262)
_MAX_READ_BYTES: Final = 2**16  # more than a header of a tar file needs
_END: Final = struct.Struct("<4s4H2LH")  # the record at the end of a zip
_END_COMMENT_BYTES: Final = 2**16 - 1
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64: Final = struct.Struct("<4sLQL")
_FOOTER: Final = struct.Struct("<L4s")


@dataclass(frozen=True)
class ArchiveLimits:
    """The limits of an uploaded archive: its entries, and the bytes that they unpack to."""

    max_entries: int
    max_bytes: int


def check_images(path: Path, limits: ArchiveLimits) -> str:
    """Returns the suffix of the file at `path` by its content: `.zip`, `.tar`, `.parquet`, or that
    of the image's format.

    Raises InvalidInput, naming the entry, if the file is neither an image nor an archive within
    the limits: names must stay inside the archive, and links, devices and encrypted entries are
    refused.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _check(_check_zip, path, limits, ".zip")
    if head[_TAR_MAGIC] == b"ustar":
        return _check(_check_tar, path, limits, ".tar")
    if head.startswith(b"PAR1"):
        return _check(_check_parquet, path, limits, ".parquet")
    return _suffix_of_image(head)


def open_upload(path: Path, filename: str) -> "Source":
    """Opens an upload with the keys that its owner knows: the stored file has another name.

    filename: the owner's name of the file. Raises what `open_source` raises.
    """
    from mlcd.images.sources import open_source

    source = open_source(str(path))
    source.rename(lambda key: filename if key == path.name else key.removeprefix(f"{path.stem}/"))
    return source


def _check(
    check: Callable[[Path, ArchiveLimits], None], path: Path, limits: ArchiveLimits, suffix: str
) -> str:
    try:
        check(path, limits)
    except InvalidInput:
        raise
    except (
        OSError,
        ValueError,
        EOFError,
        OverflowError,
        NotImplementedError,
        RecursionError,
        struct.error,
        tarfile.TarError,
        zipfile.BadZipFile,
        pa.ArrowException,
    ) as error:
        raise InvalidInput(
            f"the {suffix[1:]} file is damaged or cut short", remedy="pack it again"
        ) from error
    return suffix


def _check_zip(path: Path, limits: ArchiveLimits) -> None:
    num_entries, num_directory_bytes = _zip_directory(path)
    _check_count(num_entries, limits)
    _check_directory(num_directory_bytes, limits)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    _check_count(len(members), limits)
    for member in members:
        _check_name(member.filename)
        if member.flag_bits & 1:
            _refuse(member.filename, "is encrypted")
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            _refuse(member.filename, "is a link or a device")
    _check_distinct(member.filename for member in members)
    size = path.stat().st_size
    if sum(member.compress_size for member in members) > size:
        raise InvalidInput("entries of the zip file overlap", remedy="pack it again")
    _check_unpacked(sum(member.file_size for member in members), size, limits)


def _zip_directory(path: Path) -> tuple[int, int]:
    """Returns the number of entries that a zip file states, and the bytes of its directory: what
    `zipfile` would read into memory.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = file.seek(max(0, size - _END.size - _END_COMMENT_BYTES))
        tail = file.read()
        place = tail.rfind(b"PK\x05\x06")
        if place < 0:
            raise zipfile.BadZipFile
        *_, num_entries, num_bytes, _, _ = _END.unpack_from(tail, place)
        locator = start + place - _LOCATOR_64.size
        if locator < 0:
            return num_entries, num_bytes
        file.seek(locator)
        mark, _, offset, _ = _LOCATOR_64.unpack(file.read(_LOCATOR_64.size))
        if mark != b"PK\x06\x07":
            return num_entries, num_bytes
        file.seek(offset)
        end = _END_64.unpack(file.read(_END_64.size))
        return end[7], end[8]


class _BoundedReads(BufferedIOBase):
    """A tar file that refuses reads above 64 KiB: otherwise `tarfile` would read a long name or
    an extended header of any size into memory.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_READ_BYTES:
            raise tarfile.ReadError("a header of the tar file is too large")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _check_tar(path: Path, limits: ArchiveLimits) -> None:
    names = []
    with (
        path.open("rb") as raw,
        tarfile.open(fileobj=cast("IO[bytes]", _BoundedReads(raw)), mode="r:") as archive,
    ):
        for member in archive:
            archive.members.clear()  # type: ignore[attr-defined]  # or all stay in memory
            _check_name(member.name)
            if not (member.isreg() or member.isdir()) or member.issparse():
                _refuse(member.name, "is a link, a device or a sparse file")
            if member.isreg():
                names.append(member.name)
                _check_count(len(names), limits)
    _check_distinct(names)


def _check_parquet(path: Path, limits: ArchiveLimits) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(size - _FOOTER.size)
        num_footer_bytes, _ = _FOOTER.unpack(file.read())
    _check_directory(num_footer_bytes, limits)
    metadata = pq.read_metadata(path)
    _check_count(metadata.num_rows, limits)
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    _check_unpacked(sum(group.total_byte_size for group in groups), size, limits)


def _check_name(name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in name or name[1:2] == ":":
        _refuse(name, "leads out of the archive")


def _check_distinct(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            _refuse(name, "is in the archive twice")
        seen.add(name)


def _check_count(num_entries: int, limits: ArchiveLimits) -> None:
    if num_entries > limits.max_entries:
        raise InvalidInput(
            f"an archive must have at most {limits.max_entries} entries, got {num_entries}",
            remedy="split it into several archives",
        )


def _check_directory(num_bytes: int, limits: ArchiveLimits) -> None:
    max_bytes = _BASE_DIRECTORY_BYTES + _DIRECTORY_BYTES * limits.max_entries
    if num_bytes > max_bytes:
        raise InvalidInput(
            f"the directory of an archive must have at most {max_bytes} bytes, got {num_bytes}",
            remedy="split it into several archives, or shorten the names in it",
        )


def _check_unpacked(num_bytes: int, size: int, limits: ArchiveLimits) -> None:
    max_bytes = min(limits.max_bytes, max(_FREE_BYTES, _MAX_RATIO * size))
    if num_bytes > max_bytes:
        raise InvalidInput(
            f"the archive must unpack to at most {max_bytes} bytes, got {num_bytes}",
            remedy="split it into several archives, or store the images uncompressed",
        )


def _refuse(name: str, fault: str) -> NoReturn:
    raise InvalidInput(f"{printable(name)[:200]} {fault}", remedy="leave it out of the archive")


def _suffix_of_image(head: bytes) -> str:
    kind = format_of(head)
    if kind == "other":
        raise InvalidInput("the file is neither an image nor an archive", remedy=_IMAGES_REMEDY)
    return f".{kind.lower()}"
