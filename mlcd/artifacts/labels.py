"""The LabelTable artifact: the nearest centers of each sample, best first.

part-00000.parquet  key, sha256 of the image, ids list<int32>, scores list<float16> (score
                    descending, id ascending); if the centers have them, clusters
                    list<int32> and paths list<string>, the cluster of each id and its path
                    through the levels; on request embedding fixed_size_list<float32>[d], the
                    unit row that was labeled
names.json          optional: the names of the centers, so that a reader does not need the centers
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Artifact, open_artifact
from mlcd.types import Embeddings, Neighbors, SampleKey

NAMES = "names.json"
_Number = TypeVar("_Number", np.int32, np.float32)
DIGEST_BYTES = 32  # bytes of SHA-256
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("sha256", pa.binary(DIGEST_BYTES)),
        ("ids", pa.list_(pa.int32())),
        ("scores", pa.list_(pa.float16())),
    ]
)


def write_part(
    draft: Draft,
    part: int,
    keys: Sequence[SampleKey],
    image_sha256: Sequence[bytes],
    neighbors: Neighbors,
    embeddings: Embeddings | None = None,
    center_columns: Mapping[str, pa.Array] = MappingProxyType({}),
) -> None:
    """Writes one part; entries with id -1 are omitted, so rows may differ in length.

    embeddings: [n, D], a further column. center_columns: further columns of lists by name, from
    the values of all centers, [K]: a row gets the values of its ids.
    """
    present = neighbors.ids >= 0
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=1))]).astype(np.int32)
    ids = pa.ListArray.from_arrays(offsets, neighbors.ids[present].astype(np.int32))
    scores = pa.ListArray.from_arrays(offsets, neighbors.scores[present].astype(np.float16))
    columns = [
        pa.array(keys, pa.string()),
        pa.array(image_sha256, pa.binary(DIGEST_BYTES)),
        ids,
        scores,
    ]
    table = pa.table(columns, schema=SCHEMA)
    for name, values in center_columns.items():
        table = table.append_column(
            name, pa.ListArray.from_arrays(offsets, values.take(ids.values))
        )
    if embeddings is not None:
        rows = pa.FixedSizeListArray.from_arrays(
            np.ascontiguousarray(embeddings).reshape(-1), embeddings.shape[1]
        )
        table = table.append_column("embedding", rows)
    with draft.write(part_name(part)) as path:
        pq.write_table(table, path)


def part_name(part: int) -> str:
    return f"part-{part:05d}.parquet"


@dataclass(frozen=True)
class LabelTable:
    """A reader of a labels artifact."""

    artifact: Artifact

    @classmethod
    def open(cls, path: Path) -> "LabelTable":
        return cls(open_artifact(path, "labels"))

    @property
    def num_centers(self) -> int:
        return int(self.artifact.config["num_centers"])

    @property
    def num_rows(self) -> int:
        """Returns the number of samples, with and without labels."""
        return sum(pq.read_metadata(part).num_rows for part in self._parts)

    @property
    def classes(self) -> str | None:
        """Returns the digest of the centers, or of the names, that the ids refer to."""
        parents = (parent.digest for parent in self.artifact.parents if parent.role == "centers")
        return next(parents, self.artifact.config.get("names_digest"))

    @property
    def names(self) -> list[str | None] | None:
        """Returns the names of the centers; None without names."""
        if NAMES not in self.artifact.files:
            return None
        names: list[str | None] = json.loads(self.artifact.file(NAMES).read_text())
        return names

    @cached_property
    def keys(self) -> list[SampleKey]:
        keys: list[SampleKey] = self._column("key").to_pylist()
        return keys

    @cached_property
    def image_sha256(self) -> list[bytes]:
        """Returns the SHA-256 of each row's image; a different image with the same key is another
        sample.
        """
        digests: list[bytes] = self._column("sha256").to_pylist()
        return digests

    def image_digests(self) -> Iterator[tuple[SampleKey, bytes]]:
        yield from zip(self.keys, self.image_sha256, strict=True)

    @cached_property
    def ids(self) -> NDArray[np.int32]:
        """Returns the labels, int32 [N, L], padded with -1 if a sample has fewer than L."""
        return _pad(self._column("ids"), -1, np.int32)

    @cached_property
    def scores(self) -> NDArray[np.float32]:
        """Returns the cosines of the labels, float32 [N, L], padded with -inf."""
        return _pad(self._column("scores"), -np.inf, np.float32)

    def iter_batches(self, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Yields the columns of at most `num_rows` samples at a time, in order."""
        for part in self._parts:
            yield from pq.ParquetFile(part).iter_batches(num_rows)

    def row_of_key(self) -> dict[SampleKey, int]:
        return {key: row for row, key in enumerate(self.keys)}

    def read_keys(self) -> pa.ChunkedArray:
        """Returns the keys of the samples with labels, [n] large_string in order; each call reads
        the files again.
        """
        parts = [
            self._read_labeled(part, "key")["key"].cast(pa.large_string()) for part in self._parts
        ]
        return pa.chunked_array(
            [chunk for part in parts for chunk in part.chunks], pa.large_string()
        )

    def iter_ids(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """Yields the labels of the samples of `read_keys`, part by part: ids int32 [m, L], padded
        with -1, and SHA-256 of the images uint8 [m, 32]. L may differ between parts.
        """
        for part in self._parts:
            table = self._read_labeled(part, "sha256")
            digests = b"".join(table["sha256"].to_pylist())
            yield (
                _pad(table["ids"], -1, np.int32),
                np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
            )

    def iter_scores(self) -> Iterator[NDArray[np.float32]]:
        """Yields the scores of the labels of `iter_ids`: float32 [m, L], padded with 0."""
        for part in self._parts:
            yield _pad(self._read_labeled(part, "scores")["scores"], 0.0, np.float32)

    def first_labels(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float64]]]:
        """Yields id and score of the nearest center of the samples of `read_keys`, part by part,
        [m] each.
        """
        for part in self._parts:
            table = self._read_labeled(part, "scores")
            ids, scores = (pc.list_element(table[name], 0) for name in ("ids", "scores"))
            yield ids.to_numpy(), scores.to_numpy().astype(np.float64)

    @property
    def _parts(self) -> list[Path]:
        return [
            self.artifact.path / name
            for name in sorted(self.artifact.files)
            if name.endswith(".parquet")
        ]

    def _column(self, name: str) -> pa.ChunkedArray:
        return pa.concat_tables([pq.read_table(part, columns=[name]) for part in self._parts])[name]

    def _read_labeled(self, part: Path, column: str) -> pa.Table:
        table = pq.read_table(part, columns=[column, "ids"])
        return table.filter(pc.greater(pc.list_value_length(table["ids"]), 0))


def _pad(lists: pa.ChunkedArray, missing: float, dtype: type[_Number]) -> NDArray[_Number]:
    column = lists.combine_chunks()
    lengths = np.diff(column.offsets.to_numpy())
    padded = np.full((len(lengths), max(1, lengths.max(initial=0))), missing, dtype=dtype)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = column.flatten().to_numpy()
    return padded
