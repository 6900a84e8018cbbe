"""The changes of a collection in Postgres since one of its revisions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from mlcd.collections.changes import Effect
from mlcd.collections.memory_state import Difference, check_fits
from mlcd.collections.postgres.items_table import ItemsTable
from mlcd.collections.postgres.pinned_facts import read_facts
from mlcd.collections.postgres.postgres_database import Database
from mlcd.collections.postgres.reused_connections import Connection
from mlcd.collections.searcher import Searcher


@dataclass(frozen=True)
class ChangedRows:
    """The table of a collection, read by revision."""

    database: Database
    table: ItemsTable

    @contextmanager
    def changes(self, known: Searcher, mark: int | None) -> Iterator[Difference | None]:
        """Opens what has changed since the revision `mark`, as of one moment."""
        with self.database.reading() as connection:
            facts = read_facts(connection, self.table.number)
            if facts.revision == mark:
                yield None
                return
            check_fits(facts.items, "Postgres")
            above = -1 if mark is None else mark
            yield Difference(self._effects(connection, known, above), facts.revision)

    def _effects(self, connection: Connection, known: Searcher, above: int) -> Iterator[Effect]:
        there = self.table.row_numbers(connection)
        alive = np.flatnonzero(known.alive)
        for position in alive[~np.isin(known.rows[alive], there)].tolist():
            yield Effect(known.ids[position])
        for block in self.table.blocks(connection, above=above):
            for item_id, row, vector, metadata in zip(
                block.ids, block.rows.tolist(), block.vectors, block.metadata, strict=True
            ):
                yield Effect(item_id, row, vector, metadata)
