"""The table of one collection's items in Postgres, and the changes of one transaction.

row        number that always means the same vector, as in `mlcd.collections.ledger`
id         unique, also if several servers add the item
metadata   canonical JSON as text
facets     the metadata as jsonb, for filters
vector     float32, of norm 1
revision   the collection's revision at the last write of the row
thumbnail  the picture, null without one
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pgvector import Vector
from psycopg import sql

from mlcd.collections.fetched_rows import FetchedRows
from mlcd.collections.ledger import StoredItem
from mlcd.collections.postgres.reused_connections import Connection
from mlcd.collections.postgres.sql_filters import is_storable
from mlcd.errors import InvalidInput
from mlcd.images.thumbnail import Thumbnail
from mlcd.types import Embeddings

_SHOWN: Final = 80
_READ_ROWS: Final = 2000
# the first 8 bytes of SHA-256, as `Thumbnail.version`
_VERSION: Final = sql.SQL("encode(substr(sha256(thumbnail), 1, 8), 'hex')")
_SET_THUMBNAIL: Final = sql.SQL(
    "UPDATE {table} SET thumbnail = %b WHERE id = %s AND thumbnail IS DISTINCT FROM %b"
)
_CREATE_TABLE: Final = sql.SQL(
    'CREATE TABLE {table} (row bigint PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE,'
    " metadata text NOT NULL, facets jsonb NOT NULL, vector vector({dimension}) NOT NULL,"
    " revision bigint NOT NULL, thumbnail bytea);"
    " CREATE INDEX ON {table} USING gin (facets jsonb_path_ops)"
)


@dataclass(frozen=True)
class ItemsTable:
    """The table of the collection with the number `number`."""

    number: int
    dimension: int

    @property
    def name(self) -> sql.Identifier:
        return sql.Identifier("mlcd", f"items_{self.number}")

    def make(self, connection: Connection) -> None:
        connection.execute(
            _CREATE_TABLE.format(table=self.name, dimension=sql.Literal(self.dimension))
        )

    def add_thumbnail_column(self, connection: Connection) -> None:
        """Adds the thumbnail column to a table of an earlier version of mlcd that lacks it."""
        (has_column,) = connection.execute(
            "SELECT EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass(%s)"
            " AND attname = 'thumbnail')",
            [f"mlcd.items_{self.number}"],
        ).fetchone() or (True,)
        if not has_column:
            connection.execute(
                self.statement(
                    sql.SQL("ALTER TABLE {table} ADD COLUMN IF NOT EXISTS thumbnail bytea")
                )
            )

    def drop(self, connection: Connection) -> None:
        connection.execute(sql.SQL("DROP TABLE {}").format(self.name))

    def statement(self, template: sql.SQL, **parts: sql.Composable) -> sql.Composed:
        """Returns the template with {table} and other parts filled in."""
        return template.format(table=self.name, **parts)

    def read_rows(self, rows: Sequence[Sequence[Any]]) -> FetchedRows:
        """Converts the result of a statement that selects row, id, metadata and vector."""
        vectors = np.empty((len(rows), self.dimension), dtype=np.float32)
        for index, row in enumerate(rows):
            vectors[index] = row[3].to_numpy()
        row_numbers = np.array([row[0] for row in rows], dtype=np.int64)
        return FetchedRows(row_numbers, [row[1] for row in rows], [row[2] for row in rows], vectors)

    def blocks(
        self, connection: Connection, num_rows: int = _READ_ROWS, *, above: int = -1
    ) -> Iterator[FetchedRows]:
        """Yields the items written after the revision `above`, by row, in blocks."""
        query = self.statement(
            sql.SQL(
                "SELECT row, id, metadata, vector FROM {table} WHERE revision > %s ORDER BY row"
            )
        )
        with connection.cursor(f"items_{self.number}", binary=True) as cursor:
            cursor.execute(query, [above])
            while rows := cursor.fetchmany(num_rows):
                yield self.read_rows(rows)

    def read_thumbnails(
        self, connection: Connection, ids: Sequence[str]
    ) -> Iterator[tuple[str, Thumbnail]]:
        """Yields (id, thumbnail) for the items of these ids that have a thumbnail."""
        query = self.statement(
            sql.SQL(
                "SELECT id, thumbnail FROM {table} WHERE id = ANY(%s) AND thumbnail IS NOT NULL"
            )
        )
        with connection.cursor(binary=True) as cursor:
            for item_id, picture in cursor.execute(query, [list(ids)]):
                yield item_id, Thumbnail(picture)

    def thumbnail_versions(self, connection: Connection, ids: Sequence[str]) -> dict[str, str]:
        query = self.statement(
            sql.SQL(
                "SELECT id, {version} FROM {table} WHERE id = ANY(%s) AND thumbnail IS NOT NULL"
            ),
            version=_VERSION,
        )
        return dict(connection.execute(query, [list(ids)]).fetchall())

    def without_thumbnail(self, connection: Connection) -> list[str]:
        query = self.statement(sql.SQL("SELECT id FROM {table} WHERE thumbnail IS NULL"))
        return [item_id for (item_id,) in connection.execute(query)]

    def show(self, connection: Connection, thumbnails: Mapping[str, Thumbnail]) -> None:
        """Sets the thumbnails of existing items."""
        parameters = [
            (thumbnail.data, item_id, thumbnail.data) for item_id, thumbnail in thumbnails.items()
        ]
        if parameters:
            with connection.cursor() as cursor:
                cursor.executemany(self.statement(_SET_THUMBNAIL), parameters)

    def row_numbers(self, connection: Connection) -> NDArray[np.int64]:
        row = connection.execute(
            self.statement(sql.SQL("SELECT array_agg(row ORDER BY row) FROM {table}"))
        ).fetchone()
        return np.array((row or (None,))[0] or [], dtype=np.int64)


@dataclass
class WrittenBatch:
    """The changes of one transaction, collected first and then written in few statements.

    next_row: number for the next new row. revision: the collection's revision after the
    transaction. thumbnails: new thumbnails by item id. fields: names of the written fields.
    """

    connection: Connection
    table: ItemsTable
    next_row: int
    revision: int
    thumbnails: Mapping[str, Thumbnail]
    fields: set[str] = field(default_factory=set)
    _stored: dict[str, StoredItem] = field(default_factory=dict)
    _vectors: dict[int, Embeddings] = field(default_factory=dict)
    _removed: list[int] = field(default_factory=list)
    _described: list[tuple[str, str, int, int]] = field(default_factory=list)
    _inserted: list[tuple[int, str, str, str, Vector, int, bytes | None]] = field(
        default_factory=list
    )

    def look_up(self, ids: Sequence[str]) -> None:
        """Reads the stored items of these ids."""
        query = self.table.statement(
            sql.SQL("SELECT row, id, metadata, vector FROM {table} WHERE id = ANY(%s)")
        )
        with self.connection.cursor(binary=True) as cursor:
            for start in range(0, len(ids), _READ_ROWS):
                cursor.execute(query, [list(ids[start : start + _READ_ROWS])])
                for row, item_id, metadata, vector in cursor:
                    self._stored[item_id] = StoredItem(row, item_id, metadata)
                    self._vectors[row] = vector.to_numpy()

    def find(self, item_id: str) -> StoredItem | None:
        return self._stored.get(item_id)

    def vectors(self, rows: Sequence[int], dimension: int) -> Embeddings:  # noqa: ARG002
        return np.stack([self._vectors[row] for row in rows])

    def insert(self, item_id: str, vector: Embeddings, metadata: str) -> int:
        row, self.next_row = self.next_row, self.next_row + 1
        checked = self._check_metadata(item_id, metadata)
        picture = self.thumbnails.get(item_id)
        self._inserted.append(
            (
                row,
                item_id,
                metadata,
                checked,
                Vector(vector),
                self.revision,
                None if picture is None else picture.data,
            )
        )
        return row

    def describe(self, item: StoredItem, metadata: str) -> None:
        checked = self._check_metadata(item.id, metadata)
        self._described.append((metadata, checked, self.revision, item.row))

    def remove(self, row: int) -> None:
        self._removed.append(row)

    @property
    def num_added(self) -> int:
        return len(self._inserted) - len(self._removed)

    def write(self) -> None:
        """Writes all changes; they are durable when the transaction ends."""
        statement, connection = self.table.statement, self.connection
        if self._removed:
            connection.execute(
                statement(sql.SQL("DELETE FROM {table} WHERE row = ANY(%s)")), [self._removed]
            )
        with connection.cursor() as cursor:
            if self._described:
                cursor.executemany(
                    statement(
                        sql.SQL(
                            "UPDATE {table} SET metadata = %s, facets = %s::jsonb, revision = %s"
                            " WHERE row = %s"
                        )
                    ),
                    self._described,
                )
            if self._inserted:
                cursor.executemany(
                    statement(
                        sql.SQL(
                            "INSERT INTO {table} (row, id, metadata, facets, vector, revision,"
                            " thumbnail) VALUES (%s, %s, %s, %s::jsonb, %b, %s, %b)"
                        )
                    ),
                    self._inserted,
                )
        inserted = {item_id for _, item_id, *_ in self._inserted}
        self.table.show(
            connection,
            {
                item_id: picture
                for item_id, picture in self.thumbnails.items()
                if item_id not in inserted
            },
        )

    def _check_metadata(self, item_id: str, metadata: str) -> str:
        """Returns the metadata if Postgres can store them. Raises InvalidInput."""
        if metadata == "{}":
            return metadata
        parsed = json.loads(metadata)
        if ("\\u0000" in metadata or "\\ud" in metadata) and not all(
            map(is_storable, _texts(parsed))
        ):
            raise InvalidInput(
                f"the metadata of {item_id[:_SHOWN]!r} have a character that Postgres cannot store",
                remedy="leave out U+0000 and halves of surrogate pairs",
            )
        self.fields |= parsed.keys()
        return metadata


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
