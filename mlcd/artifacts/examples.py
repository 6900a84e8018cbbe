"""The keys of samples near each center, in a file that is read row by row.

examples.arrow  an Arrow IPC file, one row per center: keys list<large_string>, nearest
                first, and similarities list<float32>, their cosines with the center, null
                if not measured in the center's space
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlcd.errors import ArtifactInvalid
from mlcd.types import SampleKey

EXAMPLES: Final = "examples.arrow"
_SCHEMA: Final = pa.schema(
    [("keys", pa.list_(pa.large_string())), ("similarities", pa.list_(pa.float32()))]
)
_BATCH_CENTERS: Final = 4096


@dataclass(frozen=True)
class CenterExample:
    key: SampleKey
    similarity: float | None


class Examples:
    """A few samples of each center. Opened from a file, they are memory-mapped."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self.batches = batches
        self._stops = list(accumulate(batch.num_rows for batch in batches))
        # not to_numpy, which imports pandas if installed and delays a server's start by 0.2 s
        self._parts = [
            (np.from_dlpack(keys.offsets), keys.values, similarities.values)
            for keys, similarities in map(_columns, batches)
        ]

    @classmethod
    def of(
        cls, keys: pa.Array, counts: NDArray[np.integer], similarities: NDArray[np.floating] | None
    ) -> "Examples":
        """Builds the examples from columns.

        keys: [n] strings, ordered by center. counts: [K], number of keys of each center.
        similarities: [n], None if not measured.
        """
        stops = np.concatenate([[0], np.cumsum(counts)])
        scores = (
            pa.nulls(len(keys), pa.float32())
            if similarities is None
            else pa.array(similarities, pa.float32())
        )
        return cls(list(_batches(keys.cast(pa.large_string()), scores, stops)))

    @classmethod
    def open(cls, path: Path) -> "Examples":
        """Opens a file of examples. Raises ArtifactInvalid for other or damaged content."""
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            raise ArtifactInvalid(
                f"{path} cannot be read: it is damaged", remedy="cluster again"
            ) from error
        if reader.schema != _SCHEMA:
            raise ArtifactInvalid(f"{path} must hold examples of centers", remedy="cluster again")
        return cls(batches)

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def of_center(self, center: int, num: int | None = None) -> list[CenterExample]:
        """Returns the first `num` examples of a center, or all."""
        index = bisect_right(self._stops, center)
        row = center - (self._stops[index] - self.batches[index].num_rows)
        offsets, keys, similarities = self._parts[index]
        start, stop = int(offsets[row]), int(offsets[row + 1])
        length = stop - start if num is None else min(num, stop - start)
        pairs = zip(
            keys.slice(start, length).to_pylist(),
            similarities.slice(start, length).to_pylist(),
            strict=True,
        )
        return [CenterExample(key, similarity) for key, similarity in pairs]

    def append(self, examples: "Examples") -> "Examples":
        """Returns these examples followed by the examples of further centers."""
        return Examples([*self.batches, *examples.batches])

    def with_center(self, center: int, own: "Examples") -> "Examples":
        """Returns the examples with those of one center replaced. own: examples of one center."""
        index = bisect_right(self._stops, center)
        batch, (new,) = self.batches[index], own.batches
        row = center - (self._stops[index] - batch.num_rows)
        columns = [
            pa.concat_arrays([old.slice(0, row), column, old.slice(row + 1)])
            for old, column in zip(batch.columns, new.columns, strict=True)
        ]
        changed = pa.record_batch(columns, schema=_SCHEMA)
        return Examples([*self.batches[:index], changed, *self.batches[index + 1 :]])

    def write(self, path: Path) -> None:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
            for batch in self.batches:
                writer.write_batch(batch)


def _columns(batch: pa.RecordBatch) -> tuple[pa.ListArray, pa.ListArray]:
    return batch.column("keys"), batch.column("similarities")


def _batches(
    keys: pa.Array, similarities: pa.Array, stops: NDArray[np.integer]
) -> Iterator[pa.RecordBatch]:
    num_centers = len(stops) - 1
    for first in range(0, num_centers, _BATCH_CENTERS):
        bounds = stops[first : min(first + _BATCH_CENTERS, num_centers) + 1]
        start, length = int(bounds[0]), int(bounds[-1] - bounds[0])
        offsets = pa.array(bounds - start, pa.int32())
        lists = [
            pa.ListArray.from_arrays(offsets, values.slice(start, length))
            for values in (keys, similarities)
        ]
        yield pa.record_batch(lists, schema=_SCHEMA)
