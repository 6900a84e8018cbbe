"""The indexes of FAISS over inner products: flat, graph and inverted file. Only this module imports
faiss for retrieval.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import faiss
import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ArtifactInvalid
from mlcd.indexes.index_kind import TRAINING_ROWS_PER_CELL, Kind, num_cells
from mlcd.too_many_files import refuse_too_many_files
from mlcd.types import Embeddings, Neighbors

_DIMENSIONS_PER_CODE: Final = 4


class FaissIndex:
    """A set of vectors that can be searched, in several threads at once, once it is complete.

    Rows are numbered in the order in which they were given.
    """

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def train(cls, kind: Kind, sample: Embeddings, *, num_rows: int) -> "FaissIndex":
        """Returns an empty index of this kind, with cells for `num_rows` rows that resemble
        `sample` [n, D].
        """
        dimension = sample.shape[1]
        index = faiss.index_factory(
            dimension, _recipe(kind, dimension, num_rows), faiss.METRIC_INNER_PRODUCT
        )
        if not index.is_trained:
            cells = faiss.extract_index_ivf(index)
            cells.cp.spherical = True
            # For each of its sub-quantizers faiss warns on standard error about samples that are
            # small on purpose.
            cells.cp.min_points_per_centroid = 1
            cells.cp.max_points_per_centroid = TRAINING_ROWS_PER_CELL
            with _assigning_on_gpus(cells):
                index.train(np.ascontiguousarray(sample, dtype=np.float32))
        return cls(index)

    def add(self, rows: Embeddings) -> None:
        """Adds rows, which are numbered after those present. No search may run meanwhile.

        An index is shared only when it is complete.
        """
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
        """Returns the rows of highest inner product for each unit query: ids int64 [N, top], -1
        where there are fewer.

        allowed: bool [num_rows], the rows that may be found; None: all. effort: how far an
        approximate index looks in this search alone (efSearch, nprobe); a flat one finds all.
        """
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
        """Returns parameters for one search, because all threads share those that faiss keeps on
        the index itself.
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
                f"{path} is not a readable index", remedy="build it again with `mlcd index`"
            ) from error
        return cls(index)


@contextmanager
def _assigning_on_gpus(cells: Any) -> Iterator[None]:
    """Runs the k-means of the cells on GPUs, where there are any; it takes most of the time of an
    index.

    Searches stay on the CPU, because GPU indexes support no selectors.
    """
    if faiss.get_num_gpus() == 0:
        yield
        return
    assigner = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(cells.d))
    cells.clustering_index = assigner
    try:
        yield
    finally:
        cells.clustering_index = None  # the index does not own it


def _recipe(kind: Kind, dimension: int, num_rows: int) -> str:
    """Returns the description that faiss's index factory takes."""
    if kind == "flat":
        return "Flat"
    if kind == "hnsw":
        return "HNSW32,Flat"
    cells = num_cells(num_rows)
    if kind == "ivf-sq8":
        return f"IVF{cells},SQ8"
    codes = max(1, dimension // _DIMENSIONS_PER_CODE)
    return f"OPQ{codes}_{codes * _DIMENSIONS_PER_CODE},IVF{cells},PQ{codes}"
