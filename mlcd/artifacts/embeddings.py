"""The embeddings artifact: unit rows in parts, together with the keys of the samples.

part-00000.npy           [n, d] float32 or float16, unit rows
part-00000.keys.parquet  key, class_name (from the source, null if unknown), sha256 of the
                         image's bytes, and split: its position in (0, 1) among all listed
                         images of its class, which decides what is held out
errors.jsonl             one line per sample without a row: key, reason, detail; after additions,
                         the whole list is in the errors-00000.jsonl of the newest addition,
                         named by its first part
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mlcd.artifacts.manifest import Artifact, open_artifact, verify_file
from mlcd.errors import ArtifactInvalid
from mlcd.keys import mask_held_out, normalize_class
from mlcd.types import Embeddings, Fingerprint, SampleKey, unit_rows

ERRORS = "errors.jsonl"
KEY_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("class_name", pa.string()),
        ("sha256", pa.binary(32)),
        ("split", pa.float64()),
    ]
)


def part_name(part: int) -> str:
    return f"part-{part:05d}.npy"


def errors_name_from(first_part: int) -> str:
    """Returns the name of the list of errors after an addition whose first part is this one."""
    return f"errors-{first_part:05d}.jsonl"


def keys_name(part: int) -> str:
    return f"part-{part:05d}.keys.parquet"


@dataclass(frozen=True)
class Block:
    """A block of `num_rows` rows of one part.

    offset: first row within the part. start: first row within all parts.
    """

    part: int
    offset: int
    start: int
    num_rows: int


@dataclass(frozen=True)
class EmbeddingsArtifact:
    """A reader of an embeddings artifact, which checks each part against the manifest at its first
    read.
    """

    artifact: Artifact

    @classmethod
    def open(cls, path: Path) -> "EmbeddingsArtifact":
        artifact = open_artifact(path, "embeddings", verify_files=False)
        if artifact.fingerprint is None:
            raise ArtifactInvalid(
                f"{path} must name its model by a fingerprint", remedy="embed the images again"
            )
        opened = cls(artifact)
        opened._check_rows()
        return opened

    def _check_rows(self) -> None:
        for part in range(self.num_parts):
            try:
                rows, keys = (
                    len(self._map(part)),
                    pq.read_metadata(self.artifact.path / keys_name(part)).num_rows,
                )
            except (ValueError, OSError, EOFError, pa.ArrowException) as error:
                raise ArtifactInvalid(
                    f"{self.artifact.path / part_name(part)} or its keys are damaged",
                    remedy="embed the images again, or copy both files again from an intact copy",
                ) from error
            if rows != keys:
                raise ArtifactInvalid(
                    f"{self.artifact.path / part_name(part)} has {rows} rows and {keys} keys",
                    remedy="embed the images again",
                )

    @property
    def fingerprint(self) -> Fingerprint:
        assert self.artifact.fingerprint is not None
        return self.artifact.fingerprint

    @property
    def errors_file(self) -> Path:
        """Returns the newest list of skipped samples."""
        additions = [name for name in self.artifact.files if name.startswith("errors-")]
        return self.artifact.file(max(additions, default=ERRORS))

    def skipped(self) -> list[dict[str, str]]:
        """Returns key, reason and detail of each sample without a row."""
        return [
            json.loads(line) for line in self.errors_file.read_text(encoding="utf-8").splitlines()
        ]

    @cached_property
    def num_parts(self) -> int:
        return sum(name.endswith(".npy") for name in self.artifact.files)

    @cached_property
    def num_rows(self) -> int:
        return sum(len(self._map(part)) for part in range(self.num_parts))

    def num_rows_before(self, part: int) -> int:
        """Counts the rows of the parts before this one."""
        return sum(len(self._map(earlier)) for earlier in range(part))

    @property
    def dimension(self) -> int:
        return int(self._map(0).shape[1])

    def _column(self, name: str) -> pa.ChunkedArray:
        """Reads only one column of all parts: the splits need no millions of keys."""
        parts = [keys_name(part) for part in range(self.num_parts)]
        for part in parts:
            self._verify(part)
        return pa.concat_tables(
            [pq.read_table(self.artifact.path / part, columns=[name]) for part in parts]
        )[name]

    @cached_property
    def keys(self) -> list[SampleKey]:
        keys: list[SampleKey] = self._column("key").to_pylist()
        return keys

    def keys_at(self, rows: NDArray[np.int64]) -> pa.Array:
        """Returns the keys of these row ids, [n] large_string in the same order, with one part in
        memory at a time.
        """
        order = np.argsort(rows, kind="stable")
        sorted_rows, key_blocks, start = rows[order], [pa.array([], pa.large_string())], 0
        for part in range(self.num_parts):
            stop = start + len(self._map(part))
            in_part = sorted_rows[slice(*np.searchsorted(sorted_rows, [start, stop]))]
            if len(in_part):
                self._verify(keys_name(part))
                keys = pq.read_table(self.artifact.path / keys_name(part), columns=["key"])["key"]
                key_blocks.append(
                    keys.cast(pa.large_string()).take(pa.array(in_part - start)).combine_chunks()
                )
            start = stop
        return pa.concat_arrays(key_blocks).take(pa.array(np.argsort(order, kind="stable")))

    @cached_property
    def class_names(self) -> list[str | None]:
        """Returns the class of each row, None if the source has none; for evaluation, never for
        training.
        """
        names = self._column("class_name").to_pylist()
        return [None if name is None else normalize_class(name) for name in names]

    @cached_property
    def splits(self) -> NDArray[np.float64]:
        """Returns the split of each row, [N] in (0, 1); see `mlcd.keys.split_positions`."""
        splits: NDArray[np.float64] = self._column("split").to_numpy()
        return splits

    def held_out(self, fraction: float) -> NDArray[np.bool_]:
        """Returns the mask of the rows that clustering and training must not use, [N] bool."""
        return mask_held_out(self.splits, fraction)

    @cached_property
    def image_sha256(self) -> list[bytes]:
        digests: list[bytes] = self._column("sha256").to_pylist()
        return digests

    def image_digests(self) -> Iterator[tuple[SampleKey, bytes]]:
        yield from zip(self.keys, self.image_sha256, strict=True)

    def blocks(self, num_rows: int = 8192) -> Iterator[tuple[int, Embeddings]]:
        """Yields the index of the first row and the float32 rows of each block, in order."""
        for block in self.plan(num_rows):
            yield block.start, self.read(block)

    def plan(self, num_rows: int = 8192) -> list[Block]:
        """Returns blocks of at most `num_rows` rows, for reading in any order, by any process."""
        blocks: list[Block] = []
        start = 0
        for part in range(self.num_parts):
            length = len(self._map(part))
            for offset in range(0, length, num_rows):
                blocks.append(Block(part, offset, start, min(num_rows, length - offset)))
                start += blocks[-1].num_rows
        return blocks

    def read(self, block: Block) -> Embeddings:
        """Returns the rows of one block: [n, D] float32."""
        self._verify(part_name(block.part))
        rows = self._map(block.part)[block.offset : block.offset + block.num_rows]
        return np.asarray(rows, dtype=np.float32)

    def read_keys(self, block: Block) -> tuple[list[SampleKey], list[bytes]]:
        """Returns the keys and the images' SHA-256 of one block, without reading other blocks."""
        self._verify(keys_name(block.part))
        table = pq.read_table(self.artifact.path / keys_name(block.part), columns=["key", "sha256"])
        rows = table.slice(block.offset, block.num_rows)
        return rows.column("key").to_pylist(), rows.column("sha256").to_pylist()

    @cached_property
    def _verified(self) -> set[str]:
        return set()

    def _verify(self, name: str) -> None:
        if name not in self._verified:
            verify_file(self.artifact, name)
            self._verified.add(name)

    def rows_at(self, rows: NDArray[np.int64]) -> Embeddings:
        """Returns the rows of these row ids, float32 [n, D] in the same order, from memory-mapped
        files.
        """
        vectors = np.empty((len(rows), self.dimension), np.float32)
        part_of_row = np.searchsorted(self._starts, rows, side="right") - 1
        for part in np.unique(part_of_row).tolist():
            self._verify(part_name(part))
            in_part = part_of_row == part
            vectors[in_part] = self._maps[part][rows[in_part] - self._starts[part]]
        return vectors

    def unit_rows_at(self, rows: NDArray[np.int64]) -> Embeddings:
        """Returns the rows of `rows_at`, normalized again to unit length in float32."""
        return unit_rows(self.rows_at(rows))

    @cached_property
    def _maps(self) -> list[NDArray[np.floating]]:
        return [self._map(part) for part in range(self.num_parts)]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Returns the id of the first row of each part."""
        return np.cumsum([0, *map(len, self._maps)])[:-1]

    def load(self) -> Embeddings:
        """Returns all rows in memory: [N, D] float32."""
        return np.concatenate([block for _, block in self.blocks()])

    def _map(self, part: int) -> NDArray[np.floating]:
        rows: NDArray[np.floating] = np.load(
            self.artifact.path / part_name(part), mmap_mode="r", allow_pickle=False
        )
        return rows
