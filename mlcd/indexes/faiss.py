"""FAISS indexes over inner products: flat, graph and inverted file. Only this module imports faiss
for retrieval.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import faiss
import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ArtifactInvalid
from mlcd.indexes.gpu_copy import GpuCopy
from mlcd.indexes.index_kind import TRAINING_ROWS_PER_CELL, Kind, num_cells
from mlcd.too_many_files import refuse_too_many_files
from mlcd.types import Embeddings, Neighbors

_DIMENSIONS_PER_CODE: Final = 4
# faiss's bound of neighbors and of cells on a GPU; cuVS has a higher one.
_GPU_MAX_TOP: Final = 2048
_ID_BYTES: Final = 8
_GPU_ROOM: Final = 1.5  # cells are padded, and a search takes memory
# The sizes of the list of candidates of one search. Others are rounded up to the next 32.
CAGRA_EFFORTS: Final = (32, 64, 128, 256, 512)
_CAGRA_BLOCK_QUERIES: Final = 256  # with a filter, each takes up to 512 KiB of the GPU


class FaissIndex:
    """An index that several threads may search at once after the last `add`.

    A row's id is its position in the order of addition. Cells are searched on a GPU if
    `faiss-gpu-cuvs` finds one; rows are added to the index in memory, which alone is written.
    An audit on one of GPU and CPU stands for the other, which probes the same cells and compares
    the same codes: recall is the same up to rounding.
    """

    def __init__(self, index: Any) -> None:
        self._index = index
        self._gpu_cells = _gpu_copy()

    @classmethod
    def train(cls, kind: Kind, sample: Embeddings, *, num_rows: int) -> "FaissIndex":
        """Returns an empty index of this kind, trained on `sample` [n, D] for `num_rows` rows."""
        dimension = sample.shape[1]
        index = faiss.index_factory(
            dimension, _recipe(kind, dimension, num_rows), faiss.METRIC_INNER_PRODUCT
        )
        if not index.is_trained:
            cells = faiss.extract_index_ivf(index)
            cells.cp.spherical = True
            # The sample is small on purpose; without this setting faiss warns about its size on
            # stderr, once per sub-quantizer.
            cells.cp.min_points_per_centroid = 1
            cells.cp.max_points_per_centroid = TRAINING_ROWS_PER_CELL
            with _assigning_on_gpus(cells):
                index.train(np.ascontiguousarray(sample, dtype=np.float32))
        return cls(index)

    def add(self, rows: Embeddings) -> None:
        """Appends rows; their ids continue those of the index. No search may run meanwhile."""
        self._index.add(np.ascontiguousarray(rows, dtype=np.float32))
        self._gpu_cells = _gpu_copy()

    @property
    def num_rows(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimension(self) -> int:
        return int(self._index.d)

    @property
    def on_gpu(self) -> bool:
        return self._gpu_cells.made is not None

    def copy_to_gpu(self) -> None:
        """Returns once the GPU has the cells, or it is known that the CPU has to search."""
        if (copying := self._gpu_copying()) is not None:
            self._gpu_cells.copy_now(*copying)

    def search(
        self,
        queries: Embeddings,
        top: int,
        *,
        allowed: NDArray[np.bool_] | None = None,
        effort: int | None = None,
    ) -> Neighbors:
        """Returns the rows of highest inner product with each unit query: ids int64 [N, top],
        padded with -1.

        allowed: bool [num_rows], mask of the rows to search; None allows all. effort: efSearch or
        nprobe of this search; a flat index ignores it.
        """
        options = {}
        if allowed is not None:
            options["sel"] = _selector(allowed)
        params = self._parameters(options, effort) if options or effort is not None else None
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        on_gpu = None
        if max(top, effort or 1) <= _GPU_MAX_TOP:
            on_gpu = self._search_gpu(queries, top, params)
        scores, ids = on_gpu or self._index.search(queries, top, params=params)
        missing = ids < 0
        if missing.any():
            scores[missing] = -np.inf
        elif (scores[:, 1:] < scores[:, :-1]).all():
            return Neighbors(ids, scores)
        order = np.lexsort((ids, -scores), axis=1)
        return Neighbors(
            np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
        )

    def _search_gpu(self, queries: Embeddings, top: int, params: Any) -> tuple[Any, Any] | None:
        """Returns (scores, ids) of a search on the GPU; None if the CPU has to search."""
        if (copying := self._gpu_copying()) is None:
            return None
        return self._gpu_cells.use(*copying, lambda copy: copy.search(queries, top, params))

    def _gpu_copying(self) -> "tuple[Callable[[], _GpuCells], int] | None":
        """Returns what copies the cells, and the bytes that the copy and its searches take; None if
        only the CPU may search.
        """
        if not searches_on_gpus() or (cells := faiss.try_extract_index_ivf(self._index)) is None:
            return None
        num_bytes = int(_GPU_ROOM * (cells.code_size + _ID_BYTES) * self.num_rows)
        return lambda: _GpuCells(self._index), num_bytes

    def _parameters(self, options: dict[str, Any], effort: int | None) -> Any:
        """Returns the parameters of one search. Parameters set on the faiss index itself would
        apply to all threads.
        """
        index = self._index
        if isinstance(index, faiss.IndexHNSW):
            return faiss.SearchParametersHNSW(
                **options, **({} if effort is None else {"efSearch": effort})
            )
        if isinstance(index, faiss.IndexIVF):
            return faiss.SearchParametersIVF(
                **options, **({} if effort is None else {"nprobe": effort})
            )
        if isinstance(index, faiss.IndexPreTransform):
            inner = faiss.SearchParametersIVF(
                **options, **({} if effort is None else {"nprobe": effort})
            )
            return faiss.SearchParametersPreTransform(index_params=inner)
        return faiss.SearchParameters(**options)

    def write(self, path: Path) -> None:
        faiss.write_index(self._index, str(path))

    @classmethod
    def read(cls, path: Path) -> "FaissIndex":
        try:
            index = faiss.read_index(str(path))
        except RuntimeError as error:
            refuse_too_many_files(error)
            raise ArtifactInvalid(
                f"{path} cannot be read as an index", remedy="build it again with `mlcd index`"
            ) from error
        return cls(index)


class _GpuCells:
    """A copy of an index of cells on the first GPU, which faiss lets one thread search at a time.
    cuVS takes faiss's selector as a bitset (facebookresearch/faiss#4858).
    """

    def __init__(self, index: Any) -> None:
        options = faiss.GpuClonerOptions()
        options.use_cuvs = True  # False in Python unless it is set
        self._index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index, options)
        self._lock = threading.Lock()

    def search(self, queries: Embeddings, top: int, params: Any) -> tuple[Any, Any]:
        with self._lock:
            scores, ids = self._index.search(queries, top, params=params)
        return scores, ids


class Cagra:
    """CAGRA's graph of faiss over rows on the first GPU, which takes no further rows. It can be
    searched by several threads, one at a time.
    """

    def __init__(self, address: int, num_rows: int, dimension: int) -> None:
        """address: of the rows on the GPU, float32 [num_rows, dimension], which must stay: the
        graph has a copy of its own only if the dimension is not a multiple of 4.
        """
        metric = faiss.METRIC_INNER_PRODUCT
        self._resources = faiss.StandardGpuResources()
        self._index = faiss.GpuIndexCagra(self._resources, dimension, metric)
        self._index.train_c(num_rows, faiss.cast_integer_to_float_ptr(address))
        self._lock = threading.Lock()

    def search(
        self,
        queries: Embeddings,
        top: int,
        effort: int,
        allowed: NDArray[np.bool_] | None = None,
    ) -> Neighbors:
        """Returns rows of high inner product: ids int64 [N, top], padded with -1, not in order.

        effort: at least `top`, at most the last of `CAGRA_EFFORTS`. allowed: see
        `FaissIndex.search`.
        """
        options = {} if allowed is None else {"sel": _selector(allowed)}
        # One algorithm for any number of queries: by itself, cuVS has one for few and one for many.
        params = faiss.SearchParametersCagra(
            algo=faiss.search_algo_SINGLE_CTA, itopk_size=effort, **options
        )
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        blocks = []
        for start in range(0, len(queries), _CAGRA_BLOCK_QUERIES):
            with self._lock:
                block = queries[start : start + _CAGRA_BLOCK_QUERIES]
                blocks.append(self._index.search(block, top, params=params))
        scores, ids = (np.concatenate(part) for part in zip(*blocks, strict=True))
        order = np.argsort(ids, axis=1)
        ids, scores = (np.take_along_axis(part, order, axis=1) for part in (ids, scores))
        # cuVS may return a row twice (rapidsai/raft#2234).
        is_row = (ids >= 0) & (np.diff(ids, axis=1, prepend=-1) != 0)
        return Neighbors(np.where(is_row, ids, -1), np.where(is_row, scores, -np.inf))


def _selector(allowed: NDArray[np.bool_]) -> Any:
    return faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))


def _gpu_copy() -> GpuCopy[_GpuCells]:
    return GpuCopy("the cells of collections are searched on the CPU, not on the GPU")


@cache
def searches_on_gpus() -> bool:
    """Returns whether faiss has a GPU and cuVS; its own GPU indexes ignore selectors in silence."""
    return faiss.get_num_gpus() > 0 and "CUVS" in faiss.get_compile_options()


@contextmanager
def _assigning_on_gpus(cells: Any) -> Iterator[None]:
    """Runs the k-means of the cells, which takes most of a build, on the GPUs if there are any."""
    if faiss.get_num_gpus() == 0:
        yield
        return
    assigner = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(cells.d))
    cells.clustering_index = assigner
    try:
        yield
    finally:
        cells.clustering_index = None  # a borrowed pointer: `assigner` is freed here


def _recipe(kind: Kind, dimension: int, num_rows: int) -> str:
    """Returns the description string for faiss's index factory."""
    if kind == "flat":
        return "Flat"
    if kind == "hnsw":
        return "HNSW32,Flat"
    cells = num_cells(num_rows)
    if kind == "ivf-sq8":
        return f"IVF{cells},SQ8"
    codes = max(1, dimension // _DIMENSIONS_PER_CODE)
    return f"OPQ{codes}_{codes * _DIMENSIONS_PER_CODE},IVF{cells},PQ{codes}"
