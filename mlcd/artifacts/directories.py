"""A directory on this machine or in an object store, with one interface.

In an object store, the files are objects whose names start with the directory's path. In both, a
file appears only once it is complete.
"""

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mlcd.artifacts.disk import raise_if_disk_full, replacing, translate_os_errors
from mlcd.artifacts.manifest import FileEntry
from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    MlcdError,
)
from mlcd.locations import Location, check_no_credentials, install_command_for_url
from mlcd.store_errors import cannot_open_error, translate_error

_CHUNK_BYTES: Final = 8 << 20
_SMALL_BYTES: Final = 16 << 20  # files up to this size are sent in one request


class Directory:
    """The directory at a location; it need not exist. Names of files are relative, with slashes."""

    def __init__(self, location: str, filesystem: Any, path: str) -> None:
        self.location, self._filesystem, self._path = location, filesystem, path
        self.local_path = Path(location) if isinstance(filesystem, LocalFileSystem) else None

    @classmethod
    def at(cls, location: Location) -> Self:
        """Returns the directory. Raises ConfigInvalid for a URL that this machine cannot open."""
        text = check_no_credentials(location)
        if not text:
            raise ConfigInvalid("a location is empty", remedy="give a directory or a URL")
        text = text.removeprefix("file://").rstrip("/") or "/"
        try:
            filesystem, path = fsspec.core.url_to_fs(text, use_listings_cache=False)
        except ImportError as error:
            raise ConfigInvalid(
                f"{text} needs a package that is not installed",
                remedy=install_command_for_url(text),
            ) from error
        except ValueError as error:
            raise cannot_open_error(text) from error
        return cls(text, filesystem, path.rstrip("/"))

    def contains(self, directory: "Directory") -> bool:
        """Tells whether the directory is this directory or inside it."""
        is_same_store = self._filesystem == directory._filesystem  # noqa: SLF001 - of the same class
        return is_same_store and f"{directory._path}/".startswith(f"{self._path}/")  # noqa: SLF001

    def sizes(self) -> dict[str, int]:
        """Returns the size in bytes of every file at any depth, by name."""
        with self._translate_errors():
            listing = self._filesystem.find(self._path, detail=True)
            return {
                name[len(self._path) + 1 :]: int(info["size"]) for name, info in listing.items()
            }

    def read(self, name: str) -> bytes:
        """Returns the content of a file. Raises NotFound."""
        with self._translate_errors(name):
            content: bytes = self._filesystem.cat_file(self._full_path(name))
            return content

    def measure(self, name: str) -> FileEntry:
        """Reads a file to its end and returns its size and digest. Raises NotFound."""
        return _measure(self.chunks(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the content of a file in chunks of 8 MiB. Raises NotFound."""
        with (
            self._translate_errors(name),
            self._filesystem.open(
                self._full_path(name), "rb", block_size=_CHUNK_BYTES, cache_type="readahead"
            ) as file,
        ):
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def copy(self, name: str, source: "Directory", entry: FileEntry) -> None:
        """Copies the file from the source, then reads the copy to verify it.

        Raises ArtifactInvalid if the source's file does not match `entry`; writes nothing then.
        """
        if entry.size_bytes <= _SMALL_BYTES:
            content = source.read(name)
            source.check(name, _measure(iter([content])), entry)
            self.write(name, content)
        else:
            with self._open_for_writing(name) as file:
                source.check(
                    name, _measure(self._write_through(name, source.chunks(name), file)), entry
                )
        self.check(name, self.measure(name), entry)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file."""
        if self.local_path is not None:
            with self._open_for_writing(name) as file:
                file.write(content)
            return
        with self._translate_errors(name):
            self._filesystem.pipe_file(self._full_path(name), content)

    def copy_unverified(
        self, name: str, source: "Directory", size_bytes: int | None = None
    ) -> None:
        """Copies the file from the source, without comparing digests. Raises NotFound.

        size_bytes: size of the file, if known.
        """
        if size_bytes is not None and size_bytes <= _SMALL_BYTES:
            self.write(name, source.read(name))
            return
        with self._open_for_writing(name) as file:
            for chunk in source.chunks(name):
                with self._translate_errors(name):
                    file.write(chunk)

    def check(self, name: str, actual: FileEntry, entry: FileEntry) -> None:
        """Raises ArtifactInvalid unless the file matches its entry."""
        if actual != entry:
            raise ArtifactInvalid(
                f"{self.location}/{name} differs from its manifest",
                remedy="it is damaged; restore it, or make the artifact again",
            )

    def has(self, name: str) -> bool:
        """Tells whether the file exists."""
        with self._translate_errors(name):
            return bool(self._filesystem.exists(self._full_path(name)))

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file unless it exists; tells whether it was written. If the store does not
        support conditional puts, another process may write the file at the same moment.
        """
        if self.has(name):
            return False
        with self._translate_errors(name):
            try:
                self._filesystem.pipe_file(self._full_path(name), content, mode="create")
            except FileExistsError:
                return False
            return True

    def remove(self, names: list[str]) -> None:
        """Removes files; ignores missing ones."""
        with self._translate_errors():
            for name in names:
                with suppress(FileNotFoundError):
                    self._filesystem.rm_file(self._full_path(name))

    def abort_uploads(self) -> int:
        """Aborts uploads that dead processes left in this directory; returns their number.

        Their bytes are invisible but still billed.
        """
        if not hasattr(self._filesystem, "call_s3"):
            return 0
        bucket, _, folder = self._path.partition("/")
        prefix = folder and f"{folder}/"
        num_aborted = 0
        with self._translate_errors(), _ignore_unsupported_calls():
            while uploads := self._filesystem.call_s3(
                "list_multipart_uploads", Bucket=bucket, Prefix=prefix
            ).get("Uploads"):
                for upload in uploads:
                    upload_id = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self._filesystem.call_s3("abort_multipart_upload", Bucket=bucket, **upload_id)
                num_aborted += len(uploads)
        return num_aborted

    def _full_path(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _write_through(
        self, name: str, chunks: Iterator[bytes], file: IO[bytes]
    ) -> Iterator[bytes]:
        for chunk in chunks:
            with self._translate_errors(name):
                file.write(chunk)
            yield chunk

    @contextmanager
    def _open_for_writing(self, name: str) -> Iterator[IO[bytes]]:
        """Yields a file that appears only if the block succeeds."""
        if self.local_path is not None:
            path = self.local_path / name
            with self._translate_errors(name):
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as temporary, temporary.open("wb") as file:
                    yield file
            return
        with self._translate_errors(name):
            file = self._filesystem.open(
                self._full_path(name), "wb", block_size=_SMALL_BYTES, autocommit=False
            )
        try:
            yield file
            with self._translate_errors(name):
                file.close()
                file.commit()
        except BaseException:
            with suppress(Exception):  # the next attempt aborts uploads that remain
                file.discard()
            raise

    @contextmanager
    def _translate_errors(self, name: str = "") -> Iterator[None]:
        """Turns the errors of the file system into ours."""
        full_location = f"{self.location}/{name}" if name else self.location
        try:
            if self.local_path is not None:
                with translate_os_errors(Path(full_location)):
                    yield
            else:
                yield
        except (MlcdError, GeneratorExit):
            raise
        except Exception as error:  # each file system has its own errors
            raise_if_disk_full(error, Path(full_location))
            raise translate_error(full_location, error) from error


@contextmanager
def _ignore_unsupported_calls() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise


def _measure(chunks: Iterator[bytes]) -> FileEntry:
    sha256, size = hashlib.sha256(), 0
    for chunk in chunks:
        sha256.update(chunk)
        size += len(chunk)
    return FileEntry(size, sha256.hexdigest())
