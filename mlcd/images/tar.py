"""The source that reads tar shards."""

import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import PurePosixPath
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from mlcd.errors import ImageRejected
from mlcd.images.caption_files import MAX_BYTES, SIDECARS, captions_beside
from mlcd.images.entries import Entry, constant
from mlcd.images.faults import refuse_fault
from mlcd.images.names import decoded, encoded, is_candidate, printable
from mlcd.images.read_ahead import ReadAhead
from mlcd.images.remote_files import (
    CONNECTIONS,
    ends_before,
    is_remote,
    opened,
    read,
    shown,
    threads,
)
from mlcd.images.shard_index import MEMBERS, Listing, list_once
from mlcd.images.source import FilesSource, ListingProblem
from mlcd.images.tar_spans import NOWHERE, spans_ahead
from mlcd.store_errors import translated
from mlcd.types import SampleKey

_TAR_BLOCK: Final = 512


class TarSource(FilesSource):
    """The images of uncompressed tar shards in webdataset layout, read by offset
    without unpacking.
    """

    def entry_tables(self) -> Iterator[pa.Table]:
        for path, shard in self._names_to_list():
            listing = list_once(self._filesystem, path, partial(self._list_members, path))
            if listing.damaged:
                self.problems.append(
                    ListingProblem(
                        shard, "the shard is damaged, cut short or compressed; read up to there"
                    )
                )
            members = listing.members
            yield pa.table(
                {
                    "key": pc.binary_join_element_wise(shard, members["name"], "/"),
                    "class_name": members["class_name"],
                    "size_bytes": members["size_bytes"],
                    "path": constant(encoded(path), len(members)),
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
            with (
                opened(self._filesystem, path) as raw,
                tarfile.open(fileobj=raw, mode="r:") as archive,
            ):
                for member in archive:
                    # tarfile would keep them all, a kilobyte each
                    archive.members.clear()  # type: ignore[attr-defined]
                    name = PurePosixPath(member.name)
                    if (
                        member.isreg()
                        and name.suffix == ".cls"
                        and (text := archive.extractfile(member))
                    ):
                        class_of[_sample(name)] = text.read(256).decode("utf-8", "replace").strip()
                    elif not member.isdir() and is_candidate(name):
                        is_read = member.isreg() and ".." not in name.parts
                        names.append(name)
                        offsets.append(member.offset_data if is_read else NOWHERE)
                        sizes.append(member.size if is_read else 0)
                        if member.islnk():
                            target_of[len(names) - 1] = PurePosixPath(member.linkname)
                # tarfile takes anything that is not a header for the end, but only zeros are.
                raw.seek(archive.offset)
                damaged = raw.read(_TAR_BLOCK) != bytes(_TAR_BLOCK)
        except (OSError, tarfile.TarError, EOFError) as error:
            refuse_fault(path, error)
            damaged = True
        if target_of:  # GNU tar writes all names of a file but the first as hard links to it
            index_of = {name: index for index, name in enumerate(names) if index not in target_of}
            for index, target in target_of.items():
                if (first := index_of.get(target)) is not None:
                    offsets[index], sizes[index] = offsets[first], sizes[first]
        samples = [_sample(name) for name in names]
        num_images = Counter(samples)
        keys = [
            printable(sample if num_images[sample] == 1 else name.as_posix())
            for sample, name in zip(samples, names, strict=True)
        ]
        class_names = [class_of.get(sample) for sample in samples]
        return Listing(pa.table([keys, class_names, offsets, sizes], schema=MEMBERS), damaged)

    def captions(self) -> Iterator[tuple[SampleKey, str]]:
        shards = dict(self._names())
        for path, entries in groupby(self.entries, lambda entry: decoded(entry.locator[0])):
            captions = self._captions_of_samples(path)
            for entry in entries:
                name = PurePosixPath(entry.key.removeprefix(f"{shards[path]}/"))
                for text in captions.get(_sample(name), ()):
                    yield entry.key, text

    def _captions_of_samples(self, path: str) -> dict[str, list[str]]:
        """Returns the captions of each sample of a shard, as far as it can be read."""
        found: dict[str, dict[str, list[str]]] = {suffix: {} for suffix in SIDECARS}
        try:
            with (
                opened(self._filesystem, path) as raw,
                tarfile.open(fileobj=raw, mode="r:") as archive,
            ):
                for member in archive:
                    archive.members.clear()  # type: ignore[attr-defined]
                    name = PurePosixPath(member.name)
                    suffix = name.name[len(name.name.split(".", 1)[0]) :]
                    if suffix in found and (file := archive.extractfile(member)):
                        sample = printable(_sample(name))
                        item = f"{printable(path)}: {sample}"
                        texts = captions_beside(suffix, file.read(MAX_BYTES + 1), item)
                        if texts:
                            found[suffix][sample] = texts
        except (OSError, tarfile.TarError, EOFError) as error:
            refuse_fault(path, error)
        first, second = (found[suffix] for suffix in SIDECARS)
        return second | first

    @contextmanager
    def _reading_ahead(self, entries: Iterable[Entry]) -> Iterator[ReadAhead | None]:
        if not is_remote(self._filesystem):
            yield None
            return
        with threads(CONNECTIONS) as pool:
            yield ReadAhead(spans_ahead(entries, pool, self._read_span, self._read))

    def _read(self, entry: Entry) -> bytes:
        path, offset = entry.locator
        if offset == NOWHERE:
            raise ImageRejected(
                "unreadable", "a symbolic link, a device or a name that leads out of the archive"
            )
        data = self._read_span(path, offset, offset + entry.size_bytes)
        if len(data) != entry.size_bytes:
            raise ImageRejected("unreadable", "the shard ends inside this image")
        return data

    def _read_span(self, path: bytes, start: int, end: int) -> bytes:
        """Reads a part of a shard.

        Raises MlcdError naming the shard where a store does not give it: the images are not at
        fault.
        """
        name = decoded(path)
        try:
            return read(self._filesystem, name, start, end)
        except OSError as error:
            if is_remote(self._filesystem) and not ends_before(error):
                raise translated(shown(self._filesystem, name), error) from error
            raise ImageRejected("unreadable", "the shard cannot be read") from error


def _sample(name: PurePosixPath) -> str:
    """Returns webdataset's key: the path up to the first dot of its last part."""
    return (name.parent / name.name.split(".", 1)[0]).as_posix()
