"""The thumbnails of one collection in Milvus, in a collection of their own: Milvus would read them
whenever it reads an item. It is made with the first picture.

key       that of the item, as in `item_records`
version   that of the picture
picture   base64, because Milvus lacks bytes
vector    zeros that nobody searches, because Milvus wants some

A picture goes before the item's vector changes, and comes after it: no crash leaves that of an
earlier vector.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mlcd.collections.changes import Change
from mlcd.collections.milvus.connection import MilvusConnection
from mlcd.collections.milvus.expressions import quote_list
from mlcd.collections.milvus.graph_kinds import Graph
from mlcd.collections.milvus.item_records import KEY_CHARS, key_of
from mlcd.collections.milvus.schemas import ITEMS, Schema, pictures_of
from mlcd.errors import Conflict, StoreUnreachable
from mlcd.images.thumbnail import Thumbnail

_MAX_CHARS: Final = 65_535  # of a text in Milvus
MAX_BYTES: Final = 3 * (_MAX_CHARS // 4)
_DIMENSION: Final = 2  # the least of Milvus
_VERSION_CHARS: Final = 16
_PARTS: Final = 256  # of all keys, by their first two digits
_AT_ONCE: Final = 256  # pictures in a message, which takes 64 MB
_NO_GRAPH: Final = Graph("flat", "FLAT", {}, "", (), 0)
_SCHEMA: Final = Schema(
    {
        "key": ("VARCHAR", {"max_length": KEY_CHARS, "is_primary": True}),
        "version": ("VARCHAR", {"max_length": _VERSION_CHARS}),
        "picture": ("VARCHAR", {"max_length": _MAX_CHARS}),
    },
    (ITEMS,),
)


@dataclass
class MilvusThumbnails:
    """The thumbnails of the collection with this name in Milvus."""

    connection: MilvusConnection
    identity: str
    _is_open: bool = False

    @property
    def name(self) -> str:
        return pictures_of(self.identity)

    def read(self, item_ids: Sequence[str]) -> dict[str, Thumbnail]:
        """Returns the pictures of those of the items that have one, by id."""
        pairs = self._query_items(item_ids, ["key", "picture"])
        return {item_id: Thumbnail(base64.b64decode(data)) for item_id, data in pairs}

    def versions(self, item_ids: Sequence[str]) -> dict[str, str]:
        return dict(self._query_items(item_ids, ["key", "version"]))

    def keys(self) -> Iterator[str]:
        """Yields the keys of all items that have a picture."""
        if not self._open_where_present():
            return
        for part in range(_PARTS):  # of one length, as keys are spread evenly
            expression = f'key like "{part:02x}%"'
            for record in self.connection.query(self.name, expression, ["key"], ITEMS):
                yield record["key"]

    def write(self, pictures: Mapping[str, Thumbnail]) -> None:
        """Gives items these pictures; one of more than `MAX_BYTES` is left out."""
        records = [
            {
                "key": key_of(item_id),
                "version": picture.version,
                "picture": base64.b64encode(picture.data).decode(),
                "vector": [0.0] * _DIMENSION,
            }
            for item_id, picture in pictures.items()
            if len(picture.data) <= MAX_BYTES
        ]
        if records and not self._open_where_present():
            self._make()
        for start in range(0, len(records), _AT_ONCE):
            self.connection.upsert(self.name, records[start : start + _AT_ONCE], ITEMS)

    def remove(self, item_ids: Iterable[str]) -> None:
        keys = sorted(map(key_of, item_ids))
        if keys and self._open_where_present():
            self.connection.delete(self.name, f"key in {quote_list(keys)}", ITEMS)

    def drop(self) -> None:
        if self._open_where_present():
            self.connection.drop(self.name)

    def _query_items(
        self, item_ids: Sequence[str], fields: Sequence[str]
    ) -> Iterator[tuple[str, str]]:
        if not self._open_where_present():
            return
        id_of = {key_of(item_id): item_id for item_id in item_ids}
        keys = list(id_of)
        for start in range(0, len(keys), _AT_ONCE):
            expression = f"key in {quote_list(keys[start : start + _AT_ONCE])}"
            for record in self.connection.query(self.name, expression, fields, ITEMS):
                yield id_of[record["key"]], record[fields[-1]]

    def _open_where_present(self) -> bool:
        """Tells whether there are pictures; makes sure that Milvus answers for them."""
        if not self._is_open and self.connection.describe(self.name) is not None:
            self.connection.load(self.name)
            self._is_open = True
        return self._is_open

    def _make(self) -> None:
        try:
            self.connection.make(self.name, _SCHEMA, _NO_GRAPH, _DIMENSION)
        except (Conflict, StoreUnreachable):  # another server made it at the same time
            if not self._open_where_present():
                raise
        self._open_where_present()


def new_pictures(changes: Sequence[Change]) -> dict[str, Thumbnail]:
    """Returns the pictures of the items as these changes leave them."""
    pictures: dict[str, Thumbnail] = {}
    for change in changes:
        for effect in change.effects:
            if effect.row is None or effect.vector is not None:
                pictures.pop(effect.id, None)
        if change.error is None:
            pictures |= change.request.thumbnails
    return pictures
