"""Reads images from tar shards."""

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
from mlcd.images.faults import raise_if_file_system_error
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
    """The images of uncompressed tar shards in webdataset's layout, read by offset."""

    def entry_tables(self) -> Iterator[pa.Table]:
        for path, shard in self._names_to_list():
            listing = list_once(self._filesystem, path, partial(self._list_members, path))
            if listing.damaged:
                self.problems.append(
                    ListingProblem(
                        shard,
                        "the shard is damaged, cut short or compressed; only its start was read",
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
            raise_if_file_system_error(path, error)
            damaged, links = True, [link for link in links if link.is_file]
        for link, data in self._follow_links(path, links, _MAX_CLASS_BYTES):
            classes[stem_of(link.name)] = self._class_in(path, link, data)
        names = [image.name for image in images]
        columns = [
            _keys(names),
            _match_classes(names, classes),
            [image.offset for image in images],
            [image.size for image in images],
        ]
        return Listing(pa.table(columns, schema=MEMBERS), damaged)

    def captions(self) -> Iterator[tuple[str, str]]:
        shards = dict(self._names())
        for path, entries in groupby(self.entries, lambda entry: decode_path(entry.locator[0])):
            names, sidecars = self._read_sidecars(path)
            spellings = Spellings(sidecars)
            names_by_key = dict(zip(_keys(names), names, strict=True))
            for entry in entries:
                name = names_by_key.get(entry.key.removeprefix(f"{shards[path]}/"))
                if name is not None:
                    for text in self._find_captions(path, name, sidecars, spellings):
                        yield entry.key, text

    def _find_captions(
        self, path: str, name: PurePosixPath, sidecars: dict[str, bytes], spellings: Spellings
    ) -> list[str]:
        """Returns an image's captions from the first non-empty file beside it, longest stem
        first.
        """
        for stem in stems_of(name):
            for suffix in SIDECARS:
                if (sidecar := spellings.find(stem + suffix)) is not None:
                    item = f"{printable(path)}: {printable(sidecar.removesuffix(suffix))}"
                    if texts := captions_beside(suffix, sidecars[sidecar], item):
                        return texts
        return []

    def _read_sidecars(self, path: str) -> tuple[list[PurePosixPath], dict[str, bytes]]:
        """Returns the names of a shard's images, and the contents of files that may contain their
        captions; of a damaged shard those in its readable part.
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
            raise_if_file_system_error(path, error)
            links = [link for link in links if link.is_file]
        for link, data in self._follow_links(path, links, MAX_BYTES + 1):
            sidecars[link.name.as_posix()] = data
        return names, sidecars

    def _follow_links(
        self, path: str, links: Iterable[TarMember], max_bytes: int
    ) -> Iterator[tuple[TarMember, bytes]]:
        """Yields links and the contents of their targets.

        Raises InvalidInput for a link whose target is not a file of the shard.
        """
        data_at: dict[int, bytes] = {}  # by offset, because many links may have the same target
        for link in links:
            if not link.is_file:
                raise InvalidInput(
                    f"{printable(path)}: {printable(str(link.name))} must be a plain file, or a "
                    "link to a file of the shard",
                    remedy="store files instead of links: tar --dereference --hard-dereference",
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
                "a link without a file, a device, a sparse file or a name outside the archive",
            )
        data = self._read_span(path, offset, offset + entry.size_bytes)
        if len(data) != entry.size_bytes:
            raise ImageRejected("unreadable", "the shard ends inside this image")
        return data

    def _read_span(self, path: bytes, start: int, end: int) -> bytes:
        """Reads a part of a shard.

        Raises MlcdError naming the shard if its store fails, so that the image is not blamed.
        """
        name = decode_path(path)
        try:
            return read(self._filesystem, name, start, end)
        except OSError as error:
            if is_remote(self._filesystem) and not ends_before(error):
                raise translate_error(name_for_people(self._filesystem, name), error) from error
            raise ImageRejected("unreadable", "the shard cannot be read") from error


def _keys(names: Sequence[PurePosixPath]) -> list[str]:
    """Returns the key of each image within its shard: webdataset's key, or the full name if several
    images share that key.
    """
    samples = [sample_of(name) for name in names]
    num_images = Counter(samples)
    return [
        printable(sample if num_images[sample] == 1 else name.as_posix())
        for sample, name in zip(samples, names, strict=True)
    ]


def _match_classes(names: Sequence[PurePosixPath], classes: Mapping[str, str]) -> list[str | None]:
    """Returns the class of each image.

    classes: classes by the name of the .cls file without its suffix. A longer name, such as
    `a.coarse.cls`, applies to webdataset's sample `a` if it is the only longer name and there is no
    image `a.coarse.png`.
    """
    image_stems = {stem_of(name) for name in names}
    longer_stems: dict[str, list[str]] = {}
    for stem in classes.keys() - image_stems:
        longer_stems.setdefault(sample_of(PurePosixPath(stem)), []).append(stem)
    spellings = Spellings(classes)

    def find_class(name: PurePosixPath) -> str | None:
        for stem in stems_of(name):
            if (spelled := spellings.find(stem)) is not None:
                return classes[spelled]
        longer = longer_stems.get(stem_of(name), ())
        return classes[longer[0]] if len(longer) == 1 else None

    return [find_class(name) for name in names]
