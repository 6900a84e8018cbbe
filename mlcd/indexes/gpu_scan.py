"""The search of a collection's vectors on a GPU, which compares all of them.

So the answers are exact, and need neither an index nor an audit: every filter is a mask, and new
vectors are appended to the copy. The index of the CPU stays: it serves where the GPU's memory does
not suffice.
"""

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.indexes import gpu_copy
from mlcd.indexes.gpu_copy import GpuCopy
from mlcd.types import Embeddings, Neighbors

if TYPE_CHECKING:  # it imports torch
    from mlcd.indexes.device_rows import DeviceRows

# Below this, a scan on the CPU takes about as long as a GPU's launches and copies.
LEAST_ROWS: Final = 4096
_FLOAT_BYTES: Final = 4
_ROOM: Final = 1.5  # for vectors that are added before the next index
_SCORE_BYTES: Final = 1 << 30


class GpuScan:
    """The copy of one generation's vectors on a GPU. Thread-safe."""

    def __init__(self) -> None:
        self._copy: GpuCopy[DeviceRows] = GpuCopy("the vectors of a collection")

    def search(
        self,
        queries: Embeddings,
        top: int,
        indexed: Embeddings,
        added: Embeddings,
        allowed: NDArray[np.bool_] | None,
    ) -> Neighbors | None:
        """Returns the nearest of all vectors; None if the CPU has to search: there is no GPU, too
        little work for one, or see `GpuCopy.use`.

        indexed: float32 [N, D], the same in each call. Other arguments: see `DeviceRows.search`.
        """
        num_rows = len(indexed) + len(added)
        if num_rows < LEAST_ROWS or (gpu := gpu_copy.find_gpu()) is None:
            return None
        from mlcd.indexes.device_rows import DeviceRows

        return self._copy.use(
            lambda: DeviceRows(indexed, gpu),
            int(_ROOM * _FLOAT_BYTES * num_rows * indexed.shape[1]) + _SCORE_BYTES,
            lambda rows: rows.search(queries, top, added, allowed),
        )
