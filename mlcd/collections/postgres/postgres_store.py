"""The collections of one database, by name."""

import threading
from typing import Self

from mlcd.collections.item import check_name, is_name
from mlcd.collections.port import DEFAULT_RECALL
from mlcd.collections.postgres.items_table import ItemsTable
from mlcd.collections.postgres.pinned_facts import Facts, find_facts
from mlcd.collections.postgres.postgres_collection import PostgresCollection
from mlcd.collections.postgres.postgres_database import Database
from mlcd.collections.search_checks import check_creation, check_same
from mlcd.collections.store import TooManyCollections
from mlcd.errors import NotFound
from mlcd.types import Fingerprint


class PostgresCollections:
    """A store that knows the collections of a database. Every method may be called from many
    threads; see `Collections` for what is not said here.

    Other servers may create and delete collections meanwhile: they are found when one is named.
    """

    def __init__(
        self, database: Database, *, background: bool, max_collections: int | None
    ) -> None:
        self._database, self._background, self._most = database, background, max_collections
        self._loses = database.loses_writes()
        self._opened: dict[str, PostgresCollection] = {}
        self._changing = threading.Lock()

    @classmethod
    def open(cls, url: str, *, background: bool = True, max_collections: int | None = None) -> Self:
        """Connects; raises what `Database.open` raises.

        background: indexes are made when they are due; otherwise only by `reindex`.
        """
        store = cls(Database.open(url), background=background, max_collections=max_collections)
        try:
            store.find_new()
        except BaseException:
            store.close()
            raise
        return store

    def close(self, *, finish: bool = True) -> None:
        for one in self.all().values():
            one.close(finish=finish)
        self._opened.clear()
        self._database.close()

    def find_new(self) -> None:
        """Opens what other servers have created, and forgets what they have deleted."""
        for name in self.arrived():
            self.open_arrived(name)

    def arrived(self) -> list[str]:
        with self._database.connected() as connection:
            found = connection.execute("SELECT name, number FROM mlcd.collections").fetchall()
        numbers: dict[str, int] = dict(found)
        with self._changing:
            for name, one in list(self._opened.items()):
                if numbers.get(name) != one.number:
                    del self._opened[name]
            return sorted(numbers.keys() - self._opened.keys())

    def has_arrived(self, name: str) -> bool:
        return is_name(name) and name not in self._opened and self._facts(name) is not None

    def open_arrived(self, name: str) -> None:
        facts = self._facts(name)
        if facts is not None:
            self._open(facts)

    def open_all_arrived(self) -> None:
        self.find_new()

    def all(self) -> dict[str, PostgresCollection]:
        return dict(sorted(self._opened.copy().items()))

    def find(self, name: str) -> PostgresCollection | None:
        return self._opened.get(check_name(name))

    def get(self, name: str) -> PostgresCollection:
        found = self.find(name)
        if found is None:
            raise NotFound("there is no such collection")
        return found

    def create(
        self, name: str, *, fingerprint: Fingerprint, dimension: int, recall: float | None = None
    ) -> tuple[PostgresCollection, bool]:
        check_name(name)
        made = False
        facts = self._facts(name)
        if facts is None:
            check_creation(dimension, DEFAULT_RECALL if recall is None else recall)
            made = self._make(name, fingerprint, dimension, recall)
            facts = self._facts(name)
        if facts is None:  # another server deletes at the same time
            raise NotFound(f"the collection {name} was deleted meanwhile", remedy="create it again")
        check_same(
            name,
            (facts.fingerprint, facts.dimension, facts.recall),
            (fingerprint, dimension, recall),
        )
        return self._open(facts), made

    def _make(
        self, name: str, fingerprint: Fingerprint, dimension: int, recall: float | None
    ) -> bool:
        """Makes the collection; returns False where another server did at the same time."""
        with self._database.writing() as connection:
            counted = connection.execute("SELECT count(*) FROM mlcd.collections").fetchone()
            if self._most is not None and counted is not None and counted[0] >= self._most:
                raise TooManyCollections(self._most)
            row = connection.execute(
                "INSERT INTO mlcd.collections (name, fingerprint, dimension, recall)"
                " VALUES (%s, %s, %s, %s) ON CONFLICT (name) DO NOTHING RETURNING number",
                (name, fingerprint, dimension, DEFAULT_RECALL if recall is None else recall),
            ).fetchone()
            if row is not None:
                ItemsTable(row[0], dimension).make(connection)
        return row is not None

    def delete(self, name: str) -> None:
        check_name(name)
        with self._database.writing() as connection:
            row = connection.execute(
                "DELETE FROM mlcd.collections WHERE name = %s RETURNING number, dimension", (name,)
            ).fetchone()
            if row is None:
                raise NotFound("there is no such collection")
            ItemsTable(*row).drop(connection)
        with self._changing:
            one = self._opened.pop(name, None)
        if one is not None:
            one.close(finish=False)

    def _facts(self, name: str) -> Facts | None:
        with self._database.connected() as connection:
            return find_facts(connection, name)

    def _open(self, facts: Facts) -> PostgresCollection:
        with self._changing:
            found = self._opened.get(facts.name)
            if found is None or found.number != facts.number:
                found = PostgresCollection(
                    self._database, facts, background=self._background, loses=self._loses
                )
                self._opened[facts.name] = found
            return found
