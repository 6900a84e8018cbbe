"""Chooses an index by the number of rows, and its effort by measurement on held-out queries.

Rows are held out as queries before the index is built. Half of them select the effort, the other
half measure its recall; an exact scan gives the true neighbors. If no effort reaches the target,
the index is dropped and every search is a scan, so no recall is promised without a measurement. The
held-out rows are added to the index afterward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from mlcd.indexes.index_kind import Kind, training_rows
from mlcd.indexes.scan import scan
from mlcd.types import Embeddings, Neighbors

if TYPE_CHECKING:  # it imports faiss
    from mlcd.indexes.faiss import FaissIndex

AUDITED_TOP: Final = 10
# Below this, a scan takes milliseconds: no speedup is worth approximate results.
FLAT_ROWS: Final = 50_000
# Above this, building a graph takes hours, while building cells takes minutes.
HNSW_ROWS: Final = 250_000
SQ8_ROWS: Final = 10_000_000
# The effort of a graph must be at least the requested number of neighbors.
EFFORTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Half of the queries audit the recall. A recall of 1.0 on 1,000 queries has the lower bound 0.9962,
# so higher targets cannot be confirmed.
HELD_OUT_QUERIES: Final = 2000
LARGEST_TARGET: Final = 0.995
_WIDENING: Final = {"flat": 1, "hnsw": 1, "ivf-sq8": 4, "ivf-pq": 16}
_RESCORED_QUERIES: Final = 64
# Rows per `add` to cells. It does not affect the cells; the build can be canceled in between.
_CELL_BLOCK_ROWS: Final = 8192
# Rows per `add` to a graph. It affects recall: 0.98 on 60,000 clustered rows with this block, 0.94
# with blocks of 4,096, at the same effort.
_GRAPH_BLOCK_ROWS: Final = 65_536
_NORMAL_95: Final = 1.959963984540054


@dataclass(frozen=True)
class Recall:
    """The share of the true `AUDITED_TOP` neighbors that were found for `queries` held-out rows,
    with its 95 % Wilson interval [low, high].

    The interval counts each query as one observation, because the neighbors of one query are not
    independent. rows: number of rows in the index when it was measured.
    """

    target: float
    measured: float
    low: float
    high: float
    queries: int
    rows: int


@dataclass(frozen=True)
class Tuned:
    """An index with the effort that reaches its target recall.

    index: None if every search is a scan. effort: see `FaissIndex.search`. widening: number of
    candidates per requested neighbor that are rescored in float32.
    """

    kind: Kind
    index: "FaissIndex | None"
    effort: int | None
    recall: Recall | None
    widening: int = 1


def kind_for(num_rows: int) -> Kind:
    if num_rows < FLAT_ROWS:
        return "flat"
    if num_rows < HNSW_ROWS:
        return "hnsw"
    return "ivf-sq8" if num_rows < SQ8_ROWS else "ivf-pq"


def widening_of(kind: Kind) -> int:
    return _WIDENING[kind]


def tune(
    rows: Embeddings,
    target: float,
    *,
    kind: Kind | None = None,
    seed: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> Tuned:
    """Builds an index of `rows` for which the lower bound of the audited recall reaches `target`.

    rows: float32 [N, D], in random order; the last `HELD_OUT_QUERIES`, at most a fifth, are the
    queries. kind: None chooses by the number of rows. advance: called with the number of rows
    processed since the last call, 0 between steps; raise in it to cancel.
    """
    kind = kind or kind_for(len(rows))
    if kind == "flat":
        advance(len(rows))
        return Tuned("flat", None, None, None)
    from mlcd.indexes.faiss import FaissIndex

    num_held_out = min(HELD_OUT_QUERIES, len(rows) // 5)
    indexed = rows[: len(rows) - num_held_out]
    queries = np.asarray(rows[len(rows) - num_held_out :])
    index = FaissIndex.train(
        kind, _sample(indexed, training_rows(kind, len(rows)), seed), num_rows=len(rows)
    )
    block_rows = _GRAPH_BLOCK_ROWS if kind == "hnsw" else _CELL_BLOCK_ROWS
    for start in range(0, len(indexed), block_rows):
        block = indexed[start : start + block_rows]
        index.add(block)
        advance(len(block))
    widening = widening_of(kind)
    index.copy_to_gpu()
    choice = choose_effort(
        lambda part, effort: rescore(
            queries[part],
            indexed,
            index.search(queries[part], AUDITED_TOP * widening, effort=effort),
            AUDITED_TOP,
        ),
        scan(queries, indexed, AUDITED_TOP),
        target,
        len(indexed),
        efforts=EFFORTS if kind != "hnsw" else graph_efforts(),
        advance=advance,
    )
    advance(num_held_out)
    if choice is None:
        return Tuned("flat", None, None, None)
    index.add(queries)
    effort, recall = choice
    return Tuned(kind, index, effort, recall, widening)


def rescore(queries: Embeddings, rows: Embeddings, neighbors: Neighbors, top: int) -> Neighbors:
    """Returns the best `top` of the neighbors, scored by their float32 vectors: [Q, top]."""
    scores = np.empty(neighbors.ids.shape, dtype=np.float32)
    for start in range(0, len(queries), _RESCORED_QUERIES):
        block = slice(start, start + _RESCORED_QUERIES)
        candidates = rows[neighbors.ids[block].ravel()].reshape(*neighbors.ids[block].shape, -1)
        scores[block] = np.matmul(candidates, queries[block, :, None])[:, :, 0]
    scores[neighbors.ids < 0] = -np.inf
    order = np.lexsort((neighbors.ids, -scores), axis=1)[:, :top]
    return Neighbors(
        np.take_along_axis(neighbors.ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
    )


def measure(neighbors: Neighbors, truth: Neighbors, target: float, num_rows: int) -> Recall:
    """Measures recall by score, not by id, so that any of several tied neighbors counts."""
    finite_scores = np.where(np.isfinite(truth.scores), truth.scores, np.inf)
    least_true_score = finite_scores.min(axis=1, keepdims=True)
    num_true = np.isfinite(truth.scores).sum(axis=1)
    hits = np.minimum((neighbors.scores >= least_true_score - _ROUNDING).sum(axis=1), num_true)
    share = float(np.mean(hits / np.maximum(num_true, 1)))
    low, high = wilson(share, len(hits))
    return Recall(target, share, low, high, len(hits), num_rows)


# Inner products of unit vectors in float32 differ by up to this with the order of summation.
_ROUNDING: Final = 1e-6


def wilson(share: float, num: int) -> tuple[float, float]:
    """Returns the 95 % Wilson interval of a mean of `num` values in [0, 1], treated as binary.

    Values between 0 and 1 vary less, so it is never narrower than the true interval.
    """
    squared = _NORMAL_95**2
    center = share + squared / (2 * num)
    margin = _NORMAL_95 * (share * (1 - share) / num + squared / (4 * num**2)) ** 0.5
    scale = 1 + squared / num
    return max(0.0, (center - margin) / scale), min(1.0, (center + margin) / scale)


def graph_efforts() -> tuple[int, ...]:
    """Returns the efforts that a graph accepts for `AUDITED_TOP` neighbors."""
    return tuple(effort for effort in EFFORTS if effort >= AUDITED_TOP)


def choose_effort(
    search: Callable[[slice, int], Neighbors],
    truth: Neighbors,
    target: float,
    num_rows: int,
    *,
    efforts: Sequence[int],
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[int, Recall] | None:
    """Returns the least effort that reaches the target on both halves of the queries, and its
    recall on the second half; None if no effort does.

    search: returns the neighbors of a slice of the queries at an effort. truth: true neighbors of
    all queries. efforts: ascending.
    """
    half = len(truth.ids) // 2

    def recall(part: slice, effort: int) -> Recall:
        true_neighbors = Neighbors(truth.ids[part], truth.scores[part])
        return measure(search(part, effort), true_neighbors, target, num_rows)

    for effort in efforts:
        advance(0)
        if recall(slice(0, half), effort).low < target:
            continue
        audit = recall(slice(half, len(truth.ids)), effort)
        if audit.low >= target:
            return effort, audit
    return None


def _sample(rows: Embeddings, num: int, seed: int) -> Embeddings:
    sampled = np.random.default_rng(seed).choice(len(rows), min(num, len(rows)), replace=False)
    return np.asarray(rows[np.sort(sampled)])
