"""CAGRA's graph over a collection's vectors on a GPU, which serves if it is audited and pays.

As with the index of the CPU, the last vectors are the queries that choose the effort and audit it.
They stay out of the graph and are scanned, as are vectors that are added.
Shapes: Q queries, N rows, A rows added to them, D dimension.
"""

import logging
import statistics
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.indexes.device_rows import DeviceRows
from mlcd.indexes.faiss import CAGRA_EFFORTS, Cagra
from mlcd.indexes.gpu_copy import CannotServe
from mlcd.indexes.scan import merge_neighbors
from mlcd.indexes.tuning import AUDITED_TOP, HELD_OUT_QUERIES, Recall, choose_effort
from mlcd.types import Embeddings, Neighbors

# Exact answers are worth more than a graph that is less than this many times as fast.
_LEAST_SPEEDUP: Final = 2.0
_TIMED_QUERIES: Final = 64
_TIMED_ROUNDS: Final = 5
_log = logging.getLogger("mlcd.collections")


class GpuGraph:
    """A graph that several threads may search at once.

    effort, recall: the least effort that reaches the target, and the recall audited with it.
    speedup: the time that a scan takes for 64 queries, over that of the graph.
    """

    def __init__(self, rows: DeviceRows, vectors: Embeddings, target: float) -> None:
        """Makes and audits the graph of `rows`, the copy of `vectors` [N, D]. Raises CannotServe if
        no effort reaches the target recall, or if a scan is about as fast.
        """
        self._rows = rows
        self._num_linked = len(vectors) - min(HELD_OUT_QUERIES, len(vectors) // 5)
        try:
            self._cagra = Cagra(rows.address(), self._num_linked, vectors.shape[1])
        except RuntimeError as error:  # it would fail again, after as long
            raise CannotServe(str(error)) from error
        queries = np.array(vectors[self._num_linked :])
        self.effort, self.recall = self._audit(queries, vectors[:0], target)
        self.speedup = self._compare_times(queries[:_TIMED_QUERIES], vectors[:0])
        _log.info(
            "a graph on the GPU searches %d vectors, %.1f times as fast as a scan: effort %d, %s",
            self._num_linked,
            self.speedup,
            self.effort,
            self.recall,
        )

    def search(
        self,
        queries: Embeddings,
        top: int,
        added: Embeddings,
        allowed: NDArray[np.bool_] | None,
    ) -> Neighbors | None:
        """Returns neighbors of each query, [Q, top], padded with -1; None if a scan has to search.
        Arguments: see `DeviceRows.search`.
        """
        linked = None if allowed is None else allowed[: self._num_linked]
        num_allowed = self._num_linked if linked is None else int(np.count_nonzero(linked))
        effort = max(self.effort, top)
        # As in a graph of the CPU: with fewer allowed rows, the nearest one is farther away.
        if not len(queries) or effort * self._num_linked > CAGRA_EFFORTS[-1] * num_allowed:
            return None
        effort = -(-effort * self._num_linked // num_allowed)
        found = self._cagra.search(queries, top, effort, linked)
        if ((found.ids >= 0).sum(axis=1) < min(top, num_allowed)).any():
            return None
        others = self._rows.search(queries, top, added, allowed, first=self._num_linked)
        return merge_neighbors(found, others, top)

    def _audit(
        self, queries: Embeddings, none_added: Embeddings, target: float
    ) -> tuple[int, Recall]:
        is_linked = np.arange(self._num_linked + len(queries)) < self._num_linked
        choice = choose_effort(
            lambda part, effort: self._cagra.search(queries[part], AUDITED_TOP, effort),
            self._rows.search(queries, AUDITED_TOP, none_added, is_linked),
            target,
            self._num_linked,
            efforts=CAGRA_EFFORTS,
        )
        if choice is None:
            raise CannotServe(f"with no effort it has a recall of {target}")
        return choice

    def _compare_times(self, queries: Embeddings, none_added: Embeddings) -> float:
        """Returns the median time of a scan over that of the graph; they are run in turns."""
        given = queries, AUDITED_TOP, none_added, None
        scans, own = [], []
        for _ in range(_TIMED_ROUNDS):
            scans.append(_seconds(lambda: self._rows.search(*given)))
            own.append(_seconds(lambda: self.search(*given)))
        speedup = statistics.median(scans) / statistics.median(own)
        if speedup < _LEAST_SPEEDUP:
            raise CannotServe(f"it is {speedup:.1f} times as fast as a scan, not {_LEAST_SPEEDUP}")
        return speedup


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
