"""Reads a column of images in parquet files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final, final

import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.images.image_columns import ColumnsSource, TableRows

_BATCH_ROWS: Final = 64
_BUFFER_BYTES: Final = 1 << 20


@final
class ParquetSource(ColumnsSource):
    """The source of parquet files, whose groups are row groups."""

    @contextmanager
    def _open(self, path: str) -> Iterator[TableRows]:
        with self._filesystem.open(path, "rb") as raw:
            yield _RowGroups(raw)


class _RowGroups:
    """The `TableRows` protocol over a parquet file."""

    def __init__(self, raw: Any) -> None:
        self._raw, self._file = raw, pq.ParquetFile(raw)
        self.schema, self.num_groups = self._file.schema_arrow, self._file.num_row_groups

    @cached_property
    def _buffered(self) -> pq.ParquetFile:
        # Without a buffer, a column's whole row group would be in memory.
        return pq.ParquetFile(self._raw, buffer_size=_BUFFER_BYTES, metadata=self._file.metadata)

    def batches(self, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from self._buffered.iter_batches(
            _BATCH_ROWS, row_groups=[group], columns=list(columns), use_threads=False
        )

    def column(self, group: int, name: str) -> pa.ChunkedArray:
        return self._file.read_row_group(group, columns=[name]).column(0)

    def read(self, columns: Sequence[str]) -> pa.Table:
        return self._file.read(list(columns))
