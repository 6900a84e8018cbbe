"""The collections of one Milvus database, by name."""

from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

from mlcd.collections.milvus.address import MilvusAddress
from mlcd.collections.milvus.collection import MilvusCollection
from mlcd.collections.milvus.connection import MilvusConnection
from mlcd.collections.milvus.schemas import (
    PinnedCollection,
    alias_of,
    is_items,
    new_name,
    read_pinned,
)
from mlcd.collections.milvus.thumbnails import MilvusThumbnails
from mlcd.collections.remote_store import RemoteCollections
from mlcd.collections.store import TooManyCollections
from mlcd.errors import ConfigInvalid, Conflict
from mlcd.types import Fingerprint

_DIMENSIONS: Final = (2, 32_768)  # least and greatest in Milvus
_THREADS: Final = 16


class MilvusCollections(RemoteCollections[PinnedCollection, MilvusCollection]):
    """The collections of one Milvus database."""

    def __init__(
        self, connection: MilvusConnection, *, background: bool, max_collections: int | None
    ) -> None:
        super().__init__()
        self._connection, self._background, self._max_collections = (
            connection,
            background,
            max_collections,
        )
        self._pool = ThreadPoolExecutor(_THREADS, "milvus")

    @classmethod
    def open(cls, url: str, *, background: bool = True, max_collections: int | None = None) -> Self:
        """Connects. Raises the errors of `MilvusConnection.open`.

        background: audit recall when due; False leaves it to `reindex`.
        """
        connection = MilvusConnection.open(MilvusAddress.of(url))
        store = cls(connection, background=background, max_collections=max_collections)
        try:
            store.find_new()
        except BaseException:
            store.close()
            raise
        return store

    def _disconnect(self) -> None:
        self._pool.shutdown()
        self._connection.close()

    def _identities(self) -> dict[str, int | str]:
        descriptions = map(self._connection.describe, filter(is_items, self._connection.names()))
        collections = [read_pinned(entry) for entry in descriptions if entry is not None]
        published = [self._find(entry.name) for entry in collections if entry is not None]
        return {entry.name: entry.identity for entry in published if entry is not None}

    def _find(self, name: str) -> PinnedCollection | None:
        described = self._connection.describe(alias_of(name))
        return None if described is None else read_pinned(described)

    def _create(self, name: str, fingerprint: Fingerprint, dimension: int, recall: float) -> bool:
        least, most = _DIMENSIONS
        if not least <= dimension <= most:
            raise ConfigInvalid(
                f"the dimension in Milvus must be {least} to {most:,}, got {dimension:,}",
                remedy="use a folder, which takes any dimension",
            )
        if self._max_collections is not None and len(self._identities()) >= self._max_collections:
            raise TooManyCollections(self._max_collections)
        index_kind = self._connection.address.index_kind
        pinned = PinnedCollection(
            name, new_name("items"), fingerprint, dimension, recall, index_kind.kind
        )
        self._connection.make(pinned.identity, pinned.schema(), index_kind, dimension)
        try:
            self._connection.publish(pinned.identity, alias_of(name))
        except Conflict:  # another server published a collection of this name first
            self._connection.drop(pinned.identity)
            return False
        return True

    def _remove(self, name: str) -> bool:
        pinned = self._find(name)
        if pinned is None:
            return False
        self._connection.withdraw(alias_of(name))
        MilvusThumbnails(self._connection, pinned.identity).drop()
        self._connection.drop(pinned.identity)
        return True

    def _open_pinned(self, pinned: PinnedCollection) -> MilvusCollection:
        self._connection.load(pinned.identity)
        return MilvusCollection(self._connection, pinned, self._pool, background=self._background)
