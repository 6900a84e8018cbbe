"""FAISS: flat, graph and inverted-file indexes of inner products. The only importer of faiss for retrieval."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import refuse_too_many_files
from mlcd.errors import ArtifactInvalid
from mlcd.types import Embeddings, Neighbors

Kind = Literal["flat", "hnsw", "ivf-sq8", "ivf-pq"]
"""hnsw: a graph over float32. ivf-sq8: cells, a byte a dimension. ivf-pq: rotated, a byte for four dimensions."""

TRAINING_ROWS_PER_CELL: Final = 64
"""faiss asks for 39 at the least; more change its cells little."""
_SMALLEST_CELLS: Final = 16
_LARGEST_CELLS: Final = 65_536
_PRODUCT_CODES: Final = 256
_DIMENSIONS_PER_CODE: Final = 4


class FaissIndex:
    """The `VectorIndex` protocol over a faiss index of inner products."""

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def train(cls, kind: Kind, sample: Embeddings, *, num_rows: int) -> "FaissIndex":
        """An empty index of this kind, its cells laid for `num_rows` rows like those of `sample` ([n, D])."""
        dimension = sample.shape[1]
        index = faiss.index_factory(
            dimension, _recipe(kind, dimension, num_rows), faiss.METRIC_INNER_PRODUCT
        )
        if not index.is_trained:
            cells = faiss.extract_index_ivf(index)
            cells.cp.spherical = True
            # faiss warns on standard error, once for each of its sub-quantizers, of samples that are small by choice.
            cells.cp.min_points_per_centroid = 1
            cells.cp.max_points_per_centroid = TRAINING_ROWS_PER_CELL
            with _assigned_on_gpus(cells):
                index.train(np.ascontiguousarray(sample, dtype=np.float32))
        return cls(index)

    def add(self, rows: Embeddings) -> None:
        """More rows, numbered on. Not while others search: an index is shared when it is complete."""
        self._index.add(np.ascontiguousarray(rows, dtype=np.float32))

    @property
    def num_rows(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimension(self) -> int:
        return int(self._index.d)

    def search(
        self,
        queries: Embeddings,
        top: int,
        *,
        allowed: NDArray[np.bool_] | None = None,
        effort: int | None = None,
    ) -> Neighbors:
        options = {}
        if allowed is not None:
            options["sel"] = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        params = self._parameters(options, effort) if options or effort is not None else None
        scores, ids = self._index.search(
            np.ascontiguousarray(queries, dtype=np.float32), top, params=params
        )
        missing = ids < 0
        if missing.any():
            scores[missing] = -np.inf
        elif (scores[:, 1:] < scores[:, :-1]).all():
            return Neighbors(ids, scores)
        order = np.lexsort((ids, -scores), axis=1)
        return Neighbors(
            np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
        )

    def _parameters(self, options: dict[str, Any], effort: int | None) -> Any:
        """Made for one search: what faiss keeps on the index itself is shared by all threads."""
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
                f"{path} is not a readable index", remedy="build it again with `mlcd index`"
            ) from error
        return cls(index)


@contextmanager
def _assigned_on_gpus(cells: Any) -> Iterator[None]:
    """Most of the time that an index takes is its k-means. Searches stay on the CPU: GPUs know no selectors."""
    if faiss.get_num_gpus() == 0:
        yield
        return
    assigner = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(cells.d))
    cells.clustering_index = assigner
    try:
        yield
    finally:
        cells.clustering_index = None  # it is not the index's own


def _recipe(kind: Kind, dimension: int, num_rows: int) -> str:
    """In the words of faiss's index factory."""
    if kind == "flat":
        return "Flat"
    if kind == "hnsw":
        return "HNSW32,Flat"
    cells = num_cells(num_rows)
    if kind == "ivf-sq8":
        return f"IVF{cells},SQ8"
    codes = max(1, dimension // _DIMENSIONS_PER_CODE)
    return f"OPQ{codes}_{codes * _DIMENSIONS_PER_CODE},IVF{cells},PQ{codes}"


def num_cells(num_rows: int) -> int:
    """The power of two next to 4 * sqrt(rows), faiss's own advice: 4,096 for a million."""
    cells = 2 ** round(np.log2(max(1.0, 4 * num_rows**0.5)))
    most = max(1, num_rows // TRAINING_ROWS_PER_CELL)
    return int(min(max(_SMALLEST_CELLS, cells), _LARGEST_CELLS, most))


def training_rows(kind: Kind, num_rows: int) -> int:
    """How many rows `train` makes use of."""
    if kind in ("flat", "hnsw"):
        return 1
    return min(num_rows, max(num_cells(num_rows), _PRODUCT_CODES) * TRAINING_ROWS_PER_CELL)
