"""The row of one collection in `mlcd.collections`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql
from psycopg.rows import class_row

from mlcd.collections.postgres.reused_connections import Connection
from mlcd.errors import NotFound

_COLUMNS: Final = sql.SQL(
    "name, number, fingerprint, dimension, recall, source, items, next_row, revision, fields,"
    " generation, indexed_items, effort, audit"
)
_SELECT: Final = sql.SQL("SELECT {} FROM mlcd.collections").format(_COLUMNS)


@dataclass(frozen=True)
class Facts:
    """The fixed properties of a collection, and its figures at one moment.

    next_row: number for the next new row. revision: grows with each change. fields: metadata fields
    that an item has, or had since the last audit. indexed_items: number of items at the last audit.
    """

    name: str
    number: int
    fingerprint: str
    dimension: int
    recall: float
    source: Mapping[str, str]
    items: int
    next_row: int
    revision: int
    fields: list[str]
    generation: int
    indexed_items: int
    effort: int | None
    audit: dict[str, Any] | None

    @property
    def identity(self) -> int:
        return self.number


def read_facts(connection: Connection, number: int, *, to_write: bool = False) -> Facts:
    """Returns the facts of a collection. to_write: locks out other writers until the transaction
    ends. Raises NotFound if the collection was deleted.
    """
    lock = sql.SQL(" FOR UPDATE" if to_write else "")
    query = sql.SQL("{} WHERE number = %s{}").format(_SELECT, lock)
    with connection.cursor(row_factory=class_row(Facts)) as cursor:
        facts = cursor.execute(query, (number,)).fetchone()
    if facts is None:
        raise NotFound("the collection was deleted meanwhile", remedy="see which there are")
    return facts


def find_facts(connection: Connection, name: str) -> Facts | None:
    """Returns the facts of the collection of this name; None if there is none."""
    query = sql.SQL("{} WHERE name = %s").format(_SELECT)
    with connection.cursor(row_factory=class_row(Facts)) as cursor:
        return cursor.execute(query, (name,)).fetchone()
