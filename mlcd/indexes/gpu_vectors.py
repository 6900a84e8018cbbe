"""The search of a collection's vectors on a GPU.

The scan compares all of them, so its answers are exact, and need neither an index nor an audit:
every filter is a mask, and new vectors are appended to the copy. Beside many vectors a graph is
made, which answers approximate searches if it keeps the target recall and is much faster. The index
of the CPU stays: it serves where the GPU's memory does not suffice.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.indexes import gpu_copy
from mlcd.indexes.gpu_copy import GpuCopy
from mlcd.indexes.tuning import Recall
from mlcd.types import Embeddings, Neighbors

if TYPE_CHECKING:  # they import torch and faiss
    from mlcd.indexes.device_rows import DeviceRows
    from mlcd.indexes.gpu_graph import GpuGraph

# Below this, a scan on the CPU takes about as long as a GPU's launches and copies.
LEAST_ROWS: Final = 4096
# A scan of fewer bytes takes one or two milliseconds.
GRAPH_LEAST_BYTES: Final = 4 << 30
_FLOAT_BYTES: Final = 4
_ROOM: Final = 1.5  # for vectors that are added before the next index
_SCORE_BYTES: Final = 1 << 30
# 64 links of 4 bytes, and while they are made twice as many, and compressed vectors.
_GRAPH_BYTES_PER_ROW: Final = 2048
_FAISS_BYTES: Final = 2 << 30
# Each takes minutes, and two would find the same memory free.
_making_a_graph: Final = threading.Lock()


@dataclass(frozen=True)
class _VectorsOnGpu:
    """The vectors on the GPU, with the graph beside them, which is made later."""

    rows: "DeviceRows"
    graph: "GpuCopy[GpuGraph]" = field(
        default_factory=lambda: GpuCopy(
            "collections on the GPU are scanned, without a graph", making=_making_a_graph
        )
    )


class GpuVectors:
    """The copy of one generation's vectors on a GPU. Thread-safe.

    A search returns None if another has to search: there is no GPU, too little work for one, or see
    `GpuCopy.use`. Its arguments: indexed: float32 [N, D], in random order, the same in each call.
    Others: see `DeviceRows.search`.
    """

    def __init__(self) -> None:
        self._copy: GpuCopy[_VectorsOnGpu] = GpuCopy(
            "collections are searched on the CPU, not on the GPU"
        )

    @property
    def graph_choice(self) -> tuple[int, Recall] | None:
        """The effort and the audited recall of the graph; None unless it serves."""
        copy = self._copy.made
        graph = None if copy is None else copy.graph.made
        return None if graph is None else (graph.effort, graph.recall)

    def scan(
        self,
        queries: Embeddings,
        top: int,
        indexed: Embeddings,
        added: Embeddings,
        allowed: NDArray[np.bool_] | None,
    ) -> Neighbors | None:
        """Returns the nearest of all vectors."""
        return self._use(
            indexed, added, lambda copy: copy.rows.search(queries, top, added, allowed)
        )

    def search_graph(
        self,
        queries: Embeddings,
        top: int,
        indexed: Embeddings,
        added: Embeddings,
        allowed: NDArray[np.bool_] | None,
        *,
        target: float,
    ) -> Neighbors | None:
        """Returns neighbors of the target recall, which is the same in each call; None also if a
        scan is better.
        """
        if indexed.nbytes < GRAPH_LEAST_BYTES or gpu_copy.find_gpu() is None:
            return None
        from mlcd.indexes.faiss import searches_on_gpus

        if not searches_on_gpus():
            return None
        from mlcd.indexes.gpu_graph import GpuGraph

        return self._use(
            indexed,
            added,
            lambda copy: copy.graph.use(
                lambda: GpuGraph(copy.rows, indexed, target),
                _graph_bytes(indexed),
                lambda graph: graph.search(queries, top, added, allowed),
            ),
        )

    def _use(
        self,
        indexed: Embeddings,
        added: Embeddings,
        search: Callable[[_VectorsOnGpu], Neighbors | None],
    ) -> Neighbors | None:
        num_rows = len(indexed) + len(added)
        if num_rows < LEAST_ROWS or (gpu := gpu_copy.find_gpu()) is None:
            return None
        from mlcd.indexes.device_rows import DeviceRows

        return self._copy.use(
            lambda: _VectorsOnGpu(DeviceRows(indexed, gpu)),
            int(_ROOM * _FLOAT_BYTES * num_rows * indexed.shape[1]) + _SCORE_BYTES,
            search,
        )


def _graph_bytes(vectors: Embeddings) -> int:
    """Returns the memory that a graph of these vectors takes, most of it while it is made."""
    # cuVS copies rows that are not a multiple of 16 bytes.
    copied = vectors.nbytes if vectors.shape[1] % 4 else 0
    return copied + _GRAPH_BYTES_PER_ROW * len(vectors) + _FAISS_BYTES
