"""Exports a collection to a Parquet file, and reads such files: id (string), embedding (list of D
float32), metadata (JSON as string).

The file's key-value metadata record the model of the embeddings: `mlcd.fingerprint`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.disk import raise_if_disk_full, replacing, translate_os_errors
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item, encode_metadata
from mlcd.errors import ArtifactInvalid, Conflict, InvalidInput
from mlcd.progress import Meter

_FINGERPRINT: Final = b"mlcd.fingerprint"
_ROWS: Final = 8192


def write_parquet(collection: Collection, path: Path, *, meter: Meter) -> int:
    """Writes all items of the current state atomically, and returns their number.

    Raises Conflict if the file exists, Unavailable if the disk is full.
    """
    if path.exists():
        raise Conflict(f"{path} exists", remedy="give another file")
    num_items = 0
    with translate_os_errors(path):
        try:
            with (
                replacing(path) as temporary,
                pq.ParquetWriter(temporary, _schema(collection)) as writer,
            ):
                for items in collection.items(_ROWS):
                    writer.write_table(_table(items, writer.schema))
                    num_items += len(items)
                    meter.advance(len(items))
        except OSError as error:
            raise_if_disk_full(error, path)
            raise
    return num_items


class ParquetItems:
    """The items of an exported file, read block by block."""

    def __init__(self, path: Path, file: pq.ParquetFile) -> None:
        self.path, self._file = path, file
        self.fingerprint: str = file.schema_arrow.metadata[_FINGERPRINT].decode()
        self.dimension: int = file.schema_arrow.field("embedding").type.list_size
        self.num_items: int = file.metadata.num_rows

    @classmethod
    def open(cls, path: Path) -> "ParquetItems":
        """Opens the file. Raises ArtifactInvalid if it is not a file of `write_parquet`."""
        remedy = "give a file written by `mlcd index COLLECTION FILE.parquet --export`"
        try:
            file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise ArtifactInvalid(
                f"{path} is not a readable parquet file", remedy=remedy
            ) from error
        schema = file.schema_arrow
        has_fields = {"id", "embedding", "metadata"} <= set(schema.names)
        is_export = _FINGERPRINT in (schema.metadata or {}) and has_fields
        if not is_export or not pa.types.is_fixed_size_list(schema.field("embedding").type):
            raise ArtifactInvalid(f"{path} is not an exported collection", remedy=remedy)
        return cls(path, file)

    def blocks(self) -> Iterator[list[Item]]:
        try:
            for batch in self._file.iter_batches(_ROWS, columns=["id", "embedding", "metadata"]):
                yield [*self._items(batch)]
        except (OSError, pa.ArrowException) as error:
            raise ArtifactInvalid(
                f"{self.path} is damaged", remedy="export the collection again"
            ) from error

    def _items(self, batch: pa.RecordBatch) -> Iterator[Item]:
        if any(column.null_count for column in batch.columns):
            raise InvalidInput(
                f"{self.path} has rows without id, embedding or metadata",
                remedy="remove these rows",
            )
        flat = batch["embedding"].flatten().to_numpy(zero_copy_only=False)
        vectors = flat.astype(np.float32, copy=False).reshape(-1, self.dimension)
        for item_id, vector, text in zip(
            batch["id"].to_pylist(), vectors, batch["metadata"].to_pylist(), strict=True
        ):
            yield Item(item_id, vector, self._metadata(item_id, text))

    def _metadata(self, item_id: str, text: str) -> dict[str, Any]:
        try:
            metadata = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(
                f"{self.path}: the metadata of {item_id[:80]!r} are not JSON"
            ) from error
        if not isinstance(metadata, dict):
            raise InvalidInput(
                f"{self.path}: the metadata of {item_id[:80]!r} are not a JSON object"
            )
        return metadata


def _schema(collection: Collection) -> pa.Schema:
    embedding = pa.list_(pa.field("element", pa.float32(), nullable=False), collection.dimension)
    fields = [("id", pa.string()), ("embedding", embedding), ("metadata", pa.string())]
    return pa.schema(fields, {_FINGERPRINT: collection.fingerprint.encode()})


def _table(items: list[Item], schema: pa.Schema) -> pa.Table:
    vectors = np.concatenate([item.embedding for item in items])
    embeddings = pa.FixedSizeListArray.from_arrays(
        pa.array(vectors, pa.float32()), type=schema.field("embedding").type
    )
    columns = [
        pa.array([item.id for item in items], pa.string()),
        embeddings,
        pa.array([encode_metadata(item.id, item.metadata) for item in items], pa.string()),
    ]
    return pa.table(columns, schema=schema)
