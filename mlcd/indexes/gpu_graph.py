"""CAGRA's graph over a collection's vectors on a GPU, which serves if it is audited and pays.

As with the index of the CPU, the last vectors are the queries that choose the effort and audit it.
They stay out of the graph and are scanned, as are vectors that are added.
Shapes: Q queries, N rows, A rows added to them, D dimension.
"""

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.cores import memory_limit_bytes
from mlcd.indexes.device_rows import DeviceRows
from mlcd.indexes.faiss import CAGRA_EFFORTS, Cagra
from mlcd.indexes.gpu_copy import CannotServe
from mlcd.indexes.scan import merge_neighbors
from mlcd.indexes.tuning import AUDITED_TOP, HELD_OUT_QUERIES, choose_effort
from mlcd.types import Embeddings, Neighbors

# Exact answers are worth more than a graph that is less than this many times as fast.
_LEAST_SPEEDUP: Final = 2.0
_TIMED_QUERIES: Final = 64
_TIMED_ROUNDS: Final = 5
# RAM that cuVS takes while it makes the graph: 128 and 64 links of 4 bytes.
_HOST_BYTES_PER_ROW: Final = 768
_HOST_SHARE: Final = 0.25
_log = logging.getLogger("mlcd.collections")


class GpuGraph:
    """A graph that several threads may search at once. Its methods raise CannotServe if the GPU
    lacks memory or failed: making it again would take minutes, and may fail as well.

    effort, recall: the least effort that reaches the target, and the recall audited with it.
    speedup: the time that a scan takes for 64 queries, over that of the graph.
    """

    def __init__(self, rows: DeviceRows, vectors: Embeddings, target: float) -> None:
        """Makes and audits the graph of `rows`, the copy of `vectors` [N, D]. Raises CannotServe
        also if no effort reaches the target recall, if a scan is about as fast, or if RAM is short.
        """
        self._rows = rows
        self._num_linked = len(vectors) - min(HELD_OUT_QUERIES, len(vectors) // 5)
        _check_ram(_HOST_BYTES_PER_ROW * len(vectors))
        queries, none_added = np.array(vectors[self._num_linked :]), vectors[:0]
        is_linked = np.arange(len(vectors)) < self._num_linked
        with _give_up_on_failure():
            self._cagra = Cagra(rows.address(), self._num_linked, vectors.shape[1])
            choice = choose_effort(
                lambda part, effort: self._cagra.search(queries[part], AUDITED_TOP, effort),
                rows.search(queries, AUDITED_TOP, none_added, is_linked),
                target,
                self._num_linked,
                efforts=CAGRA_EFFORTS,
            )
            if choice is None:
                raise CannotServe(
                    f"no effort up to {CAGRA_EFFORTS[-1]} reaches a recall of {target}"
                )
            self.effort, self.recall = choice
            self.speedup = self._compare_times(queries[:_TIMED_QUERIES], none_added)
            # The first search with a filter compiles a kernel.
            self.search(queries[:1], AUDITED_TOP, none_added, is_linked)
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
        if not len(queries) or not num_allowed:
            return None
        # The effort was audited for some neighbors among all rows; more of them, and fewer rows,
        # whose nearest is farther away, need more.
        effort = math.ceil(
            self.effort * max(1, top / AUDITED_TOP) * (self._num_linked / num_allowed)
        )
        if effort > CAGRA_EFFORTS[-1]:
            return None
        with _give_up_on_failure():
            found = self._cagra.search(queries, top, effort, linked)
            others = self._rows.search(queries, top, added, allowed, first=self._num_linked)
            neighbors = merge_neighbors(found, others, top)
            num_found = (found.ids >= 0).sum(axis=1)
            lacking = np.flatnonzero(num_found < min(top, num_allowed))
            if len(lacking):
                scanned = self._rows.search(queries[lacking], top, added, allowed)
                neighbors.ids[lacking], neighbors.scores[lacking] = scanned.ids, scanned.scores
        return neighbors

    def _compare_times(self, queries: Embeddings, none_added: Embeddings) -> float:
        """Returns the median time of a scan over that of the graph; they are run in turns."""
        given = queries, AUDITED_TOP, none_added
        scans, own = [], []
        for _ in range(_TIMED_ROUNDS):
            scans.append(_seconds(lambda: self._rows.search(*given, None)))
            own.append(_seconds(lambda: self.search(*given, None)))
        speedup = statistics.median(scans) / statistics.median(own)
        if speedup < _LEAST_SPEEDUP:
            raise CannotServe(
                f"it has to be {_LEAST_SPEEDUP} times as fast as a scan, and is {speedup:.1f} times"
            )
        return speedup


@contextmanager
def _give_up_on_failure() -> Iterator[None]:
    """Raises CannotServe for what cuVS, faiss and torch raise if the GPU lacks memory or fails."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise CannotServe(str(error)) from error


def _check_ram(num_bytes: int) -> None:
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = int(_HOST_SHARE * min(machine_bytes, memory_limit_bytes() or machine_bytes))
    if num_bytes > available:
        raise CannotServe(f"{num_bytes:,} bytes of RAM are needed, {available:,} may be taken")


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
