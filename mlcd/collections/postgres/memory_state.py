"""The items of a collection in Postgres in memory, for the map, the clusters and near-duplicates.

Only what has changed since is read again. Other searches do not need it.
"""

import threading
from typing import Final

import numpy as np

from mlcd.collections.changes import Effect
from mlcd.collections.generation import nothing
from mlcd.collections.growth import Growth
from mlcd.collections.postgres.items_table import ItemsTable
from mlcd.collections.postgres.pinned_facts import read_facts
from mlcd.collections.postgres.postgres_database import Database
from mlcd.collections.searcher import Searcher
from mlcd.errors import Conflict

MOST_ITEMS: Final = 1_000_000


class MemoryState:
    """The state of one collection as this process read it last."""

    def __init__(self, database: Database, table: ItemsTable) -> None:
        self._database, self._table = database, table
        self._growth = Growth(nothing(table.dimension), table.dimension)
        self._revision = -1
        self._searcher = self._growth.searcher()
        self._reading = threading.Lock()

    def now(self) -> Searcher:
        """Returns the present state. Raises Conflict where there are too many items for memory."""
        with self._reading, self._database.reading() as connection:
            facts = read_facts(connection, self._table.number)
            if facts.revision == self._revision:
                return self._searcher
            if facts.items > MOST_ITEMS:
                raise Conflict(
                    f"a collection of more than {MOST_ITEMS:,} items in Postgres has no map,"
                    " clusters or near-duplicates here",
                    remedy="copy it into a folder with `mlcd index`",
                )
            there = self._table.row_numbers(connection)
            before = self._searcher
            alive = np.flatnonzero(before.alive)
            gone = alive[~np.isin(before.rows[alive], there)]
            self._growth.apply(Effect(before.ids[position]) for position in gone.tolist())
            for block in self._table.blocks(connection, above=self._revision):
                self._growth.apply(
                    Effect(item_id, row, vector, metadata)
                    for item_id, row, vector, metadata in zip(
                        block.ids, block.rows.tolist(), block.vectors, block.metadata, strict=True
                    )
                )
            self._revision = facts.revision
            self._searcher = self._growth.searcher()
            return self._searcher
