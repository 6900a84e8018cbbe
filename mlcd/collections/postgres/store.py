"""The collections of one Postgres database, by name."""

from typing import Self

from mlcd.collections.postgres.collection import PostgresCollection
from mlcd.collections.postgres.database import Database
from mlcd.collections.postgres.items_table import ItemsTable
from mlcd.collections.postgres.pinned_facts import Facts, find_facts
from mlcd.collections.remote_store import RemoteCollections
from mlcd.collections.store import TooManyCollections
from mlcd.types import Fingerprint


class PostgresCollections(RemoteCollections[Facts, PostgresCollection]):
    """The collections of one Postgres database."""

    def __init__(
        self, database: Database, *, background: bool, max_collections: int | None
    ) -> None:
        super().__init__()
        self._database, self._background, self._max_collections = (
            database,
            background,
            max_collections,
        )
        self._loses = database.loses_writes()

    @classmethod
    def open(cls, url: str, *, background: bool = True, max_collections: int | None = None) -> Self:
        """Connects. Raises the errors of `Database.open`.

        background: index when due; False leaves it to `reindex`.
        """
        store = cls(Database.open(url), background=background, max_collections=max_collections)
        try:
            store.find_new()
        except BaseException:
            store.close()
            raise
        return store

    def _disconnect(self) -> None:
        self._database.close()

    def _identities(self) -> dict[str, int | str]:
        with self._database.connect() as connection:
            rows = connection.execute("SELECT name, number FROM mlcd.collections").fetchall()
        return dict(rows)

    def _find(self, name: str) -> Facts | None:
        with self._database.connect() as connection:
            return find_facts(connection, name)

    def _create(self, name: str, fingerprint: Fingerprint, dimension: int, recall: float) -> bool:
        with self._database.writing() as connection:
            counted = connection.execute("SELECT count(*) FROM mlcd.collections").fetchone()
            if (
                self._max_collections is not None
                and counted is not None
                and counted[0] >= self._max_collections
            ):
                raise TooManyCollections(self._max_collections)
            row = connection.execute(
                "INSERT INTO mlcd.collections (name, fingerprint, dimension, recall)"
                " VALUES (%s, %s, %s, %s) ON CONFLICT (name) DO NOTHING RETURNING number",
                (name, fingerprint, dimension, recall),
            ).fetchone()
            if row is not None:
                ItemsTable(row[0], dimension).make(connection)
        return row is not None

    def _remove(self, name: str) -> bool:
        with self._database.writing() as connection:
            row = connection.execute(
                "DELETE FROM mlcd.collections WHERE name = %s RETURNING number, dimension", (name,)
            ).fetchone()
            if row is not None:
                ItemsTable(*row).drop(connection)
        return row is not None

    def _open_pinned(self, pinned: Facts) -> PostgresCollection:
        with self._database.connect() as connection:
            ItemsTable(pinned.number, pinned.dimension).add_thumbnail_column(connection)
        return PostgresCollection(
            self._database, pinned, background=self._background, loses=self._loses
        )
