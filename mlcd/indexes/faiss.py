"""FAISS indexes over inner products: flat, graph and inverted file. Only this module imports faiss
for retrieval.
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
    """An index that several threads may search at once after the last `add`.

    A row's id is its position in the order of addition.
    """

    def __init__(self, index: Any) -> None:
        self._index = index

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
        """Returns the rows of highest inner product with each unit query: ids int64 [N, top],
        padded with -1.

        allowed: bool [num_rows], mask of the rows to search; None allows all. effort: efSearch or
        nprobe of this search; a flat index ignores it.
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


@contextmanager
def _assigning_on_gpus(cells: Any) -> Iterator[None]:
    """Runs the k-means of the cells, which takes most of a build, on the GPUs if there are any.

    Searches stay on the CPU, because GPU indexes do not support selectors.
    """
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
