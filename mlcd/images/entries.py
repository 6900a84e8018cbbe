"""The images of a source in columns: millions of Python objects would take gigabytes.

An image takes 20 bytes, plus its key and the source's own columns (9 bytes in tar shards).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mlcd.images.matched_keys import match_keys
from mlcd.keys import normalize_class
from mlcd.types import SampleKey

_log = logging.getLogger(__name__)

_TYPES: Final = {
    "key": pa.large_string(),
    "class_name": pa.dictionary(pa.int32(), pa.string()),
    "size_bytes": pa.int64(),
}
_BLOCK: Final = 1 << 16  # rows converted to Python objects at a time


@dataclass(frozen=True)
class Entry:
    """One image of a source. locator: where the source finds its bytes, as strings, bytes and
    numbers.
    """

    key: SampleKey
    class_name: str | None
    size_bytes: int
    locator: tuple[Any, ...]


class Entries(Sequence[Entry]):
    """An immutable sequence of `Entry`, each made on demand. Slices and selections share the
    columns.

    table: the columns key, class_name (null if unknown) and size_bytes; all further columns form
    the locators. rows: the selected rows in their order (default: all).
    """

    def __init__(self, table: pa.Table, rows: range | NDArray[np.int64] | None = None) -> None:
        self._table, self._columns = table, table.columns
        self._rows = range(table.num_rows) if rows is None else rows

    @classmethod
    def of(cls, tables: Iterable[pa.Table]) -> "Entries":
        """Joins the rows of tables with the same columns; strings may have any Arrow type.

        Class names are normalized to NFC here, for every kind of source.
        """
        typed = [_with_normal_classes(table).cast(_with_types(table.schema)) for table in tables]
        return cls(pa.concat_tables(typed or [pa.schema(_TYPES.items()).empty_table()]))

    @classmethod
    def open_mapped(cls, path: Path) -> "Entries":
        """Memory-maps a file of `write`; the entries stay valid after the file is removed."""
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            return cls(reader.read_all())

    def write(self, path: Path) -> None:
        """Writes the columns to a file that other processes map; a selection must ascend."""
        # One dictionary for all rows, so that blocks of any files can be joined.
        table = _with_wide_indices(self._table).unify_dictionaries()
        selected = np.asarray(self._rows, dtype=np.int64)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            for start in range(0, table.num_rows, _BLOCK):
                first, last = np.searchsorted(selected, [start, start + _BLOCK])
                block = table.slice(start, _BLOCK).combine_chunks()
                writer.write_table(block.take(pa.array(selected[first:last] - start)))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> "Entries": ...
    def __getitem__(self, index: int | slice) -> "Entry | Entries":
        if isinstance(index, slice):
            return Entries(self._table, self._rows[index])
        row = int(self._rows[index])
        return _entry(column[row].as_py() for column in self._columns)

    def __iter__(self) -> Iterator[Entry]:
        return map(
            _entry, zip(*(self._values(name) for name in self._table.column_names), strict=True)
        )

    def select(self, indices: NDArray[np.int64]) -> "Entries":
        """Returns the entries at `indices` [n], in that order."""
        return Entries(self._table, np.asarray(self._rows, dtype=np.int64)[indices])

    def keys(self) -> Iterator[SampleKey]:
        return self._values("key")

    def class_names(self) -> Iterator[str | None]:
        return self._values("class_name")

    def num_classes(self) -> int:
        """Returns the number of known classes in the table that these entries are selected from."""
        return len(pc.unique(self._table["class_name"]).drop_null())

    def sizes_bytes(self) -> Iterator[int]:
        return self._values("size_bytes")

    def key_column(self) -> pa.ChunkedArray:
        """Returns [N] large_string: the keys of all entries."""
        own = self._table["key"]
        if isinstance(self._rows, range) and self._rows == range(len(own)):
            return own
        return own.take(pa.array(self._rows, pa.int64()))

    def rename(self, name_of: Callable[[SampleKey], SampleKey]) -> "Entries":
        """Returns entries with `name_of(key)` as the key of each row of the table."""
        keys = pa.array(map(name_of, self._table["key"].to_pylist()), pa.large_string())
        place = self._table.schema.get_field_index("key")
        return Entries(self._table.set_column(place, "key", keys), self._rows)

    def fill_nulls_with_keys(self, column: str) -> "Entries":
        """Returns entries whose key, in bytes, replaces each null of a column of bytes."""
        place = self._table.schema.get_field_index(column)
        keys = self._table["key"].cast(pa.large_binary())
        filled = pc.coalesce(self._table[column], keys)
        return Entries(self._table.set_column(place, column, filled), self._rows)

    def find(self, keys: pa.ChunkedArray) -> NDArray[np.int32]:
        """Returns [n] int32: the index of each of n keys (large_string) among these entries, -1
        if it is missing.
        """
        matches = pc.index_in(keys, value_set=self.key_column())
        indices: NDArray[np.int32] = pc.fill_null(matches, -1).to_numpy()
        return indices

    def indices_of(self, keys: pa.ChunkedArray, table: str) -> NDArray[np.int64]:
        """Returns the ascending indices of the entries that match the keys of a table; logs the
        number of unmatched keys.
        """
        matched = match_keys(keys, self.key_column(), table)
        if matched.unmatched.num:
            _log.warning("%s: %s", table, matched.unmatched)
        return np.unique(matched.indices[matched.indices >= 0])

    def find_repeated_key(self) -> SampleKey | None:
        """Returns the first key that an earlier entry also has; None if all are distinct."""
        # Distinct hashes prove distinct keys in 8 bytes each; only keys with equal hashes are
        # compared.
        hashes = np.fromiter(map(hash, self.keys()), dtype=np.int64, count=len(self))
        hashes.sort()
        suspects = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
        suspect_keys: set[SampleKey] = set()
        for key in self.keys() if suspects else ():
            if hash(key) in suspects:
                if key in suspect_keys:
                    return key
                suspect_keys.add(key)
        return None

    def _values(self, name: str) -> Iterator[Any]:
        column, rows = self._table[name], self._rows
        if isinstance(rows, range) and rows.step == 1:
            for start in range(rows.start, rows.stop, _BLOCK):
                yield from column.slice(start, min(_BLOCK, rows.stop - start)).to_pylist()
        else:
            for row in rows:
                yield column[int(row)].as_py()


def _entry(values: Iterable[Any]) -> Entry:
    key, class_name, size_bytes, *locator = values
    return Entry(key, class_name, size_bytes, tuple(locator))


def _with_wide_indices(table: pa.Table) -> pa.Table:
    """Returns the table with int32 dictionary indices."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            chunks = [
                pa.DictionaryArray.from_arrays(chunk.indices.cast(pa.int32()), chunk.dictionary)
                for chunk in table.column(number).chunks
            ]
            wide = pa.dictionary(pa.int32(), field.type.value_type)
            table = table.set_column(number, field.name, pa.chunked_array(chunks, wide))
    return table


def _with_normal_classes(table: pa.Table) -> pa.Table:
    """Returns the table with class names normalized by `normalize_class`."""
    place = table.schema.get_field_index("class_name")
    names = table.column(place)
    distinct_names = pc.unique(names)
    normal = [
        None if name is None else normalize_class(name) for name in distinct_names.to_pylist()
    ]
    if normal == distinct_names.to_pylist():
        return table
    spelled = pa.array(normal, pa.string()).take(pc.index_in(names, value_set=distinct_names))
    return table.set_column(place, "class_name", spelled)


def _with_types(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(field.name, _TYPES.get(field.name, field.type)) for field in schema])


def constant(value: bytes, num: int) -> pa.DictionaryArray:
    """Returns `num` rows of the same value, in one byte each."""
    return pa.DictionaryArray.from_arrays(
        np.zeros(num, dtype=np.int8), pa.array([value], pa.binary())
    )
