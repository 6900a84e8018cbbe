"""The thumbnails of one collection in Milvus, in a Milvus collection of their own: in that of the
items, Milvus would read them with every item. It is created with the first picture.

key       the item's key, as in `item_records`
version   the picture's version
picture   base64, because Milvus lacks a type for bytes
vector    zeros, never searched, because Milvus requires a vector field

An old picture is removed before the item's vector changes, and the new one is added afterward, so
that a crash never leaves the picture of an earlier vector.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mlcd.collections.changes import Change
from mlcd.collections.milvus.connection import MilvusConnection
from mlcd.collections.milvus.expressions import quote_list
from mlcd.collections.milvus.index_kinds import IndexKind
from mlcd.collections.milvus.item_records import KEY_CHARS, key_of
from mlcd.collections.milvus.schemas import ITEMS, Schema, pictures_of
from mlcd.errors import Conflict, StoreUnreachable
from mlcd.images.thumbnail import Thumbnail

_MAX_CHARS: Final = 65_535  # longest text in Milvus
MAX_BYTES: Final = 3 * (_MAX_CHARS // 4)
_DIMENSION: Final = 2  # least dimension in Milvus
_VERSION_CHARS: Final = 16
_PARTS: Final = 256  # ranges of keys, by their first two digits
_MESSAGE_PICTURES: Final = 256  # pictures per message, of at most 64 MB
_NO_INDEX: Final = IndexKind("flat", "FLAT", {}, "", (), 0)
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
    """The thumbnails of the collection with the name `identity` in Milvus."""

    connection: MilvusConnection
    identity: str
    _is_open: bool = False

    @property
    def name(self) -> str:
        return pictures_of(self.identity)

    def read(self, item_ids: Sequence[str]) -> dict[str, Thumbnail]:
        """Returns the pictures by item id, without items that have none."""
        pairs = self._query_items(item_ids, ["key", "picture"])
        return {item_id: Thumbnail(base64.b64decode(data)) for item_id, data in pairs}

    def versions(self, item_ids: Sequence[str]) -> dict[str, str]:
        return dict(self._query_items(item_ids, ["key", "version"]))

    def keys(self) -> Iterator[str]:
        """Yields the keys of all items that have a picture."""
        if not self._open_if_present():
            return
        for part in range(_PARTS):  # of equal size, because keys are evenly distributed
            expression = f'key like "{part:02x}%"'
            for record in self.connection.query(self.name, expression, ["key"], ITEMS):
                yield record["key"]

    def write(self, pictures: Mapping[str, Thumbnail]) -> None:
        """Sets the pictures of items, by id; skips pictures of more than `MAX_BYTES`."""
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
        if records and not self._open_if_present():
            self._create()
        for start in range(0, len(records), _MESSAGE_PICTURES):
            self.connection.upsert(self.name, records[start : start + _MESSAGE_PICTURES], ITEMS)

    def remove(self, item_ids: Iterable[str]) -> None:
        keys = sorted(map(key_of, item_ids))
        if keys and self._open_if_present():
            self.connection.delete(self.name, f"key in {quote_list(keys)}", ITEMS)

    def drop(self) -> None:
        if self._open_if_present():
            self.connection.drop(self.name)

    def _query_items(
        self, item_ids: Sequence[str], fields: Sequence[str]
    ) -> Iterator[tuple[str, str]]:
        if not self._open_if_present():
            return
        id_of = {key_of(item_id): item_id for item_id in item_ids}
        keys = list(id_of)
        for start in range(0, len(keys), _MESSAGE_PICTURES):
            expression = f"key in {quote_list(keys[start : start + _MESSAGE_PICTURES])}"
            for record in self.connection.query(self.name, expression, fields, ITEMS):
                yield id_of[record["key"]], record[fields[-1]]

    def _open_if_present(self) -> bool:
        """Loads the Milvus collection of the pictures if it exists; returns whether it does."""
        if not self._is_open and self.connection.describe(self.name) is not None:
            self.connection.load(self.name)
            self._is_open = True
        return self._is_open

    def _create(self) -> None:
        try:
            self.connection.make(self.name, _SCHEMA, _NO_INDEX, _DIMENSION)
        except (Conflict, StoreUnreachable):  # another server created it at the same time
            if not self._open_if_present():
                raise
        self._open_if_present()


def new_pictures(changes: Sequence[Change]) -> dict[str, Thumbnail]:
    """Returns the new pictures by item id, after all of these changes."""
    pictures: dict[str, Thumbnail] = {}
    for change in changes:
        for effect in change.effects:
            if effect.row is None or effect.vector is not None:
                pictures.pop(effect.id, None)
        if change.error is None:
            pictures |= change.request.thumbnails
    return pictures
