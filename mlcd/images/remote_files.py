"""Reads files in stores behind URLs, and retries if a store fails temporarily."""

import errno
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any, Final, cast

from fsspec.implementations.local import LocalFileSystem

from mlcd.backoff import Backoff
from mlcd.errors import InvalidInput
from mlcd.images.checksums import read_checksum
from mlcd.images.names import printable
from mlcd.images.streamed_file import StreamedFile
from mlcd.store_errors import is_final, translate_error

RANGE_BYTES: Final = 8 << 20  # per request: large compared with the cost of a request
CONNECTIONS: Final = 4  # concurrent range requests
_OBJECT_STORES: Final = frozenset(["s3", "s3a", "gs", "gcs", "az", "abfs"])
_PATIENCE_S: Final = 60.0  # time limit of retries
_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 10.0


def is_remote(filesystem: Any) -> bool:
    return not isinstance(filesystem, LocalFileSystem)


def is_object_store(filesystem: Any) -> bool:
    """Returns whether names are object keys, and not paths through real folders."""
    protocols = filesystem.protocol
    return not _OBJECT_STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols)


def name_for_people(filesystem: Any, path: str) -> str:
    """Returns a file's name for people: the URL."""
    return printable(filesystem.unstrip_protocol(path))


def read(filesystem: Any, path: str, start: int | None = None, end: int | None = None) -> bytes:
    """Reads a file, or a range of it; the result is shorter if the file ends inside the range.

    Raises OSError if the file is missing, forbidden or ends before the range, and Unavailable if
    its store fails for a minute.
    """
    if is_remote(filesystem):
        return _read_patiently(filesystem, path, start, end)
    return cast(bytes, filesystem.cat_file(path, start=start, end=end))


def ends_before(error: Exception) -> bool:
    """Returns whether a read failed because the file ends before the range."""
    return getattr(error, "errno", None) == errno.EINVAL


def _read_patiently(filesystem: Any, path: str, start: int | None, end: int | None) -> bytes:
    pauses = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S, jitter_s=_MAX_PAUSE_S)
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            data = cast(bytes, filesystem.cat_file(path, start=start, end=end))
            break
        except Exception as error:  # each file system has its own errors
            if is_final(error) or ends_before(error):
                raise
            pause_s = pauses.next_s()
            if time.monotonic() + pause_s > until:
                raise translate_error(name_for_people(filesystem, path), error) from error
        time.sleep(pause_s)
    if start is not None and end is not None and len(data) > end - start:
        raise InvalidInput(
            f"{name_for_people(filesystem, path)} comes as a whole, and not in ranges",
            remedy="download it, and give the copy",
        )
    return data


@contextmanager
def threads(num: int) -> Iterator[Executor]:
    """Yields a thread pool for reads from a store; reads not started at the end are canceled."""
    pool = ThreadPoolExecutor(num, thread_name_prefix="read")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def open_file(filesystem: Any, path: str) -> Iterator[IO[bytes]]:
    """Opens a file for sequential reading; a file in a store is read ahead.

    At the end it raises InvalidInput if the bytes do not match the store's checksum.
    """
    if is_remote(filesystem):
        try:
            with _stream(filesystem, path) as file:
                yield file
        except (FileNotFoundError, PermissionError) as error:
            raise translate_error(name_for_people(filesystem, path), error) from error
    else:
        with filesystem.open(path, "rb") as file:
            yield file


@contextmanager
def _stream(filesystem: Any, path: str) -> Iterator[IO[bytes]]:
    try:
        size = int(filesystem.info(path)["size"])
    except Exception as error:  # as above
        raise translate_error(name_for_people(filesystem, path), error) from error
    checksum = read_checksum(filesystem, path)
    with threads(CONNECTIONS) as pool:

        def begin(start: int, end: int) -> Future[bytes]:
            return pool.submit(read, filesystem, path, start, end)

        file = StreamedFile(
            begin, size, range_bytes=RANGE_BYTES, ahead=CONNECTIONS, checksum=checksum
        )
        yield cast(IO[bytes], file)
        file.finish()
    if checksum is not None and not checksum.matches():
        raise InvalidInput(
            f"{name_for_people(filesystem, path)} differs from the {checksum.name} that its store"
            " keeps",
            remedy="upload it again, and run the same command again",
        )
