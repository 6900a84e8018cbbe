"""The source that reads tar shards."""

import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import PurePosixPath
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from mlcd.errors import ImageRejected, InvalidInput
from mlcd.images.caption_files import MAX_BYTES, SIDECARS, captions_beside
from mlcd.images.entries import Entry, constant
from mlcd.images.faults import refuse_fault
from mlcd.images.names import decode_path, encode_path, is_candidate, is_sidecar, printable
from mlcd.images.read_ahead import ReadAhead
from mlcd.images.remote_files import (
    CONNECTIONS,
    ends_before,
    is_remote,
    name_for_people,
    open_file,
    read,
    threads,
)
from mlcd.images.shard_index import MEMBERS, Listing, list_once
from mlcd.images.sidecars import Spellings, sample_of, stem_of, stems_of
from mlcd.images.source import FilesSource, ListingProblem
from mlcd.images.tar_members import TarMember, TarMembers
from mlcd.images.tar_spans import NOWHERE, spans_ahead
from mlcd.store_errors import translate_error
from mlcd.text_tables import decode_text

_CLASS: Final = ".cls"
_MAX_CLASS_BYTES: Final = 1 << 12


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
                    "path": constant(encode_path(path), len(members)),
                    "offset": members["offset"],
                }
            )

    def _list_members(self, path: str) -> Listing:
        images: list[TarMember] = []
        classes: dict[str, str] = {}
        links: list[TarMember] = []
        damaged = False
        try:
            with open_file(self._filesystem, path) as raw:
                members = TarMembers(raw)
                for member in members:
                    if is_candidate(member.name):
                        images.append(member)
                    elif is_sidecar(member.name, _CLASS):
                        if member.target is not None or not member.is_file:
                            links.append(member)
                            continue
                        raw.seek(member.offset)
                        data = raw.read(min(member.size, _MAX_CLASS_BYTES))
                        classes[stem_of(member.name)] = self._class_in(path, member, data)
                damaged = members.is_damaged
        except (OSError, tarfile.TarError, EOFError) as error:
            refuse_fault(path, error)
            damaged, links = True, [link for link in links if link.is_file]
        for link, data in self._follow_links(path, links, _MAX_CLASS_BYTES):
            classes[stem_of(link.name)] = self._class_in(path, link, data)
        names = [image.name for image in images]
        columns = [
            _keys(names),
            _classes_of(names, classes),
            [image.offset for image in images],
            [image.size for image in images],
        ]
        return Listing(pa.table(columns, schema=MEMBERS), damaged)

    def captions(self) -> Iterator[tuple[str, str]]:
        shards = dict(self._names())
        for path, entries in groupby(self.entries, lambda entry: decode_path(entry.locator[0])):
            names, sidecars = self._sidecars(path)
            spellings = Spellings(sidecars)
            name_of = dict(zip(_keys(names), names, strict=True))
            for entry in entries:
                name = name_of.get(entry.key.removeprefix(f"{shards[path]}/"))
                for text in () if name is None else self._captions(path, name, sidecars, spellings):
                    yield entry.key, text

    def _captions(
        self, path: str, name: PurePosixPath, sidecars: dict[str, bytes], spellings: Spellings
    ) -> list[str]:
        """Returns the captions in the nearest file beside an image that has some."""
        for stem in stems_of(name):
            for suffix in SIDECARS:
                if (sidecar := spellings.find(stem + suffix)) is not None:
                    item = f"{printable(path)}: {printable(sidecar.removesuffix(suffix))}"
                    if texts := captions_beside(suffix, sidecars[sidecar], item):
                        return texts
        return []

    def _sidecars(self, path: str) -> tuple[list[PurePosixPath], dict[str, bytes]]:
        """Returns the names of a shard's images and the files that may hold their captions, as far
        as it can be read.
        """
        names: list[PurePosixPath] = []
        sidecars: dict[str, bytes] = {}
        links: list[TarMember] = []
        try:
            with open_file(self._filesystem, path) as raw:
                for member in TarMembers(raw):
                    if is_candidate(member.name):
                        names.append(member.name)
                    elif is_sidecar(member.name, *SIDECARS):
                        if member.target is not None or not member.is_file:
                            links.append(member)
                            continue
                        raw.seek(member.offset)
                        data = raw.read(min(member.size, MAX_BYTES + 1))
                        sidecars[member.name.as_posix()] = data
        except (OSError, tarfile.TarError, EOFError) as error:
            refuse_fault(path, error)
            links = [link for link in links if link.is_file]
        for link, data in self._follow_links(path, links, MAX_BYTES + 1):
            sidecars[link.name.as_posix()] = data
        return names, sidecars

    def _follow_links(
        self, path: str, links: Iterable[TarMember], max_bytes: int
    ) -> Iterator[tuple[TarMember, bytes]]:
        """Yields the files beside images that are hard links, with what they link to.

        Raises InvalidInput for a link that leads out of the shard.
        """
        data_at: dict[int, bytes] = {}  # many links lead to one file
        for link in links:
            if not link.is_file:
                raise InvalidInput(
                    f"{printable(path)}: {printable(str(link.name))} must be a plain file, or a "
                    "link to a file of the shard",
                    remedy="write the files themselves: tar --dereference --hard-dereference",
                )
            if link.offset not in data_at:
                end = link.offset + min(link.size, max_bytes)
                data_at[link.offset] = read(self._filesystem, path, link.offset, end)
            yield link, data_at[link.offset]

    def _class_in(self, path: str, member: TarMember, data: bytes) -> str:
        return decode_text(data, f"{printable(path)}: {printable(str(member.name))}").strip()

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
                "unreadable",
                "a link to no file, a device, a sparse file or a name out of the archive",
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
        name = decode_path(path)
        try:
            return read(self._filesystem, name, start, end)
        except OSError as error:
            if is_remote(self._filesystem) and not ends_before(error):
                raise translate_error(name_for_people(self._filesystem, name), error) from error
            raise ImageRejected("unreadable", "the shard cannot be read") from error


def _keys(names: Sequence[PurePosixPath]) -> list[str]:
    """Returns the key of each image within its shard: webdataset's, or the whole name of one of
    several images that share it.
    """
    samples = [sample_of(name) for name in names]
    num_images = Counter(samples)
    return [
        printable(sample if num_images[sample] == 1 else name.as_posix())
        for sample, name in zip(samples, names, strict=True)
    ]


def _classes_of(names: Sequence[PurePosixPath], classes: Mapping[str, str]) -> list[str | None]:
    """Returns the class of each image.

    classes: by the name of the .cls file, without the suffix. One of a longer name, as
    `a.coarse.cls`, is that of webdataset's sample `a` where it is the only one, and no image
    `a.coarse.png` has it.
    """
    own = {stem_of(name) for name in names}
    of_sample: dict[str, list[str]] = {}
    for stem in classes.keys() - own:
        of_sample.setdefault(sample_of(PurePosixPath(stem)), []).append(stem)
    spellings = Spellings(classes)

    def class_of(name: PurePosixPath) -> str | None:
        for stem in stems_of(name):
            if (spelled := spellings.find(stem)) is not None:
                return classes[spelled]
        longer = of_sample.get(stem_of(name), ())
        return classes[longer[0]] if len(longer) == 1 else None

    return [class_of(name) for name in names]
