"""The keys of samples near each center, in a file of which only the requested rows are read.

examples.arrow  an Arrow IPC file, one row for each center: keys list<large_string>, nearest
first, and similarities list<float32>, their cosines with the center, null
where none was measured in its space
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
    """A few samples of each center at most. Opened from a file, they are its pages and not memory
    of the process.
    """

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self.batches = batches
        self._stops = list(accumulate(batch.num_rows for batch in batches))
        # to_numpy would import pandas where it is installed, for 0.2 s of a server's start
        self._parts = [
            (np.from_dlpack(keys.offsets), keys.values, similarities.values)
            for keys, similarities in map(_columns, batches)
        ]

    @classmethod
    def of(
        cls, keys: pa.Array, counts: NDArray[np.integer], similarities: NDArray[np.floating] | None
    ) -> "Examples":
        """Builds the examples from columns.

        keys: [n] strings, those of the first center first, as many as counts [K] says.
        similarities: [n].
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
        """Opens the file. Raises ArtifactInvalid for another kind of file."""
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            raise ArtifactInvalid(
                f"{path} cannot be read", remedy="it is damaged; make the centers again"
            ) from error
        if reader.schema != _SCHEMA:
            raise ArtifactInvalid(
                f"{path} does not hold examples of centers", remedy="make the centers again"
            )
        return cls(batches)

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def of_center(self, center: int, num: int | None = None) -> list[CenterExample]:
        """Returns the first `num` examples of a center, or all."""
        number = bisect_right(self._stops, center)
        row = center - (self._stops[number] - self.batches[number].num_rows)
        offsets, keys, similarities = self._parts[number]
        start, stop = int(offsets[row]), int(offsets[row + 1])
        length = stop - start if num is None else min(num, stop - start)
        pairs = zip(
            keys.slice(start, length).to_pylist(),
            similarities.slice(start, length).to_pylist(),
            strict=True,
        )
        return [CenterExample(key, similarity) for key, similarity in pairs]

    def append(self, examples: "Examples") -> "Examples":
        """Returns these examples and, for the centers after them, the others."""
        return Examples([*self.batches, *examples.batches])

    def with_center(self, center: int, own: "Examples") -> "Examples":
        """Returns these with the examples of one center replaced by those of the one in `own`."""
        number = bisect_right(self._stops, center)
        batch, (new,) = self.batches[number], own.batches
        row = center - (self._stops[number] - batch.num_rows)
        columns = [
            pa.concat_arrays([old.slice(0, row), column, old.slice(row + 1)])
            for old, column in zip(batch.columns, new.columns, strict=True)
        ]
        changed = pa.record_batch(columns, schema=_SCHEMA)
        return Examples([*self.batches[:number], changed, *self.batches[number + 1 :]])

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
