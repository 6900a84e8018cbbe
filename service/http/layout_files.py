"""Selected items of a layout as CSV or parquet files, written in parts."""

import csv
import io
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlcd.collections.plane import Plane

CSV: Final = "text/csv"
PARQUET: Final = "application/vnd.apache.parquet"
_ROWS_PER_BATCH: Final = 8192
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n")  # as OWASP lists them
_BATCH_BYTES: Final = 2**19  # ids and metadata of a batch
_SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("position", pa.int64()),
        ("x", pa.float32()),
        ("y", pa.float32()),
        ("metadata", pa.string()),
    ]
)


def csv_parts(layout: Plane, rows: NDArray[np.int64]) -> Iterator[bytes]:
    """Yields a CSV file in UTF-8 with a header line.

    An id that a spreadsheet would execute as a formula gets a leading apostrophe.
    """
    yield (",".join(_SCHEMA.names) + "\r\n").encode()
    for batch in _iterate_batches(layout, rows):
        text = io.StringIO(newline="")
        ids, *columns = (column.to_pylist() for column in batch)
        csv.writer(text).writerows(zip(map(_escape_formula, ids), *columns, strict=True))
        yield text.getvalue().encode()


def _escape_formula(item_id: str) -> str:
    return f"'{item_id}" if item_id.startswith(_FORMULA) else item_id


def parquet_parts(layout: Plane, rows: NDArray[np.int64]) -> Iterator[bytes]:
    """Yields a parquet file, one row group at a time."""
    import pyarrow.parquet as pq  # imported here because it is slow to import

    file = _DrainedFile()
    with pq.ParquetWriter(pa.PythonFile(file, mode="w"), _SCHEMA) as writer:
        for batch in _iterate_batches(layout, rows):
            writer.write_batch(batch)
            yield file.take()
    yield file.take()


class _DrainedFile(io.RawIOBase):
    """A file whose content is drained while it is being written."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        part = bytes(data)  # type: ignore[call-overload]
        self._parts.append(part)
        return len(part)

    def take(self) -> bytes:
        part = b"".join(self._parts)
        self._parts.clear()
        return part


def _iterate_batches(layout: Plane, rows: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    state = layout.state
    for start in range(0, len(rows), _ROWS_PER_BATCH):
        batch_rows = rows[start : start + _ROWS_PER_BATCH]
        positions = layout.positions[batch_rows].tolist()
        ids = [state.ids[position] for position in positions]
        metadata = [state.metadata[position] for position in positions]
        sizes = np.cumsum([len(a) + len(b) for a, b in zip(ids, metadata, strict=True)])
        ends = np.flatnonzero(np.diff(sizes // _BATCH_BYTES)) + 1
        for part in map(slice, [0, *ends], [*ends, len(batch_rows)]):
            yield pa.record_batch(
                [
                    pa.array(ids[part], pa.string()),
                    pa.array(batch_rows[part]),
                    pa.array(layout.points[batch_rows[part], 0]),
                    pa.array(layout.points[batch_rows[part], 1]),
                    pa.array(metadata[part], pa.string()),
                ],
                schema=_SCHEMA,
            )
