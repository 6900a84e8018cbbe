"""The slow and better layout of a collection: t-SNE, which needs the extra `layout`.

The neighbors come from the collection: exact up to 50,000 items, from its index beyond that. With
one thread and a fixed seed, the same items have the same layout.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.by_row import ByRow
from mlcd.collections.collection import Collection
from mlcd.collections.plane import (
    Method,
    Projection,
    fit_square,
    read_about,
    remove_layout,
    write_layout,
)
from mlcd.collections.searcher import Searcher
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.extras import install_command
from mlcd.progress import Stages

_SEED: Final = 0
_PERPLEXITY: Final = 30
_NEIGHBORS: Final = 3 * _PERPLEXITY
_EARLY: Final = 250
_LATE: Final = 500
_EXAGGERATION: Final = 12
_EVERY: Final = 50  # iterations between two reports
_ROWS: Final = 1024
_INITIAL_DEVIATION: Final = 1e-4


def make_layout(path: Path, method: Method, reporter: Stages) -> None:
    """Makes the layout of the collection at `path`; `pca` removes a stored one, because it is
    computed on demand.

    Does nothing if a layout of the same items with the same settings exists.
    Raises ConfigInvalid where the extra is not installed, InvalidInput for too few items.
    """
    if method == "tsne":
        _check_installed()
    with Collection.open(path, background=False) as collection:
        collection.check_writable()
        if method == "pca":
            remove_layout(path)
            return
        if collection.describe().unindexed:
            with reporter.stage("index", len(collection)) as meter:
                collection.reindex(meter.advance)
        searcher = collection.state
        rows = np.sort(searcher.rows[: searcher.num_positions][searcher.alive])
        about = {
            "method": method,
            "seed": _SEED,
            "perplexity": _PERPLEXITY,
            "generation": searcher.generation.number,
            "items": len(rows),
        }
        if read_about(path) == about:
            return
        if len(rows) <= _NEIGHBORS:
            raise InvalidInput(
                f"{len(rows)} items are too few for t-SNE",
                remedy=f"give more than {_NEIGHBORS}, or leave --layout out",
            )
        order = np.argsort(searcher.rows[np.flatnonzero(searcher.alive)])
        positions = np.flatnonzero(searcher.alive)[order]
        points = _embed(searcher, positions, reporter)
        write_layout(path, ByRow(rows, fit_square(points)), about)


def _embed(
    searcher: Searcher, positions: NDArray[np.int64], reporter: Stages
) -> NDArray[np.float64]:
    from openTSNE import TSNEEmbedding
    from openTSNE.affinity import PerplexityBasedNN
    from openTSNE.nearest_neighbors import PrecomputedNeighbors

    with reporter.stage("neighbors", len(positions)) as meter:
        ids, distances = _neighbors(searcher, positions, meter.advance)
    affinities = PerplexityBasedNN(
        perplexity=_PERPLEXITY, knn_index=PrecomputedNeighbors(ids, distances), n_jobs=1
    )
    vectors = searcher.vectors(positions)
    initial = Projection.of(vectors).points(vectors).astype(np.float64)
    initial *= _INITIAL_DEVIATION / (initial[:, 0].std() or 1.0)
    with reporter.stage("layout", _EARLY + _LATE) as meter:

        def report_progress(*_: object) -> None:
            meter.advance(_EVERY)

        points: Any = TSNEEmbedding(
            initial,
            affinities,
            random_state=_SEED,
            n_jobs=1,
            callbacks=report_progress,
            callbacks_every_iters=_EVERY,
        )
        points = points.optimize(n_iter=_EARLY, exaggeration=_EXAGGERATION, momentum=0.5)
        points = points.optimize(n_iter=_LATE, momentum=0.8)
    return np.asarray(points, dtype=np.float64)


def _neighbors(
    searcher: Searcher, positions: NDArray[np.int64], advance: Callable[[int], None]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the nearest neighbors of each item, as indices into `positions`, and distances."""
    index_of = np.full(searcher.num_positions, -1, dtype=np.int64)
    index_of[positions] = np.arange(len(positions))
    alive = searcher.alive[: searcher.num_indexed]
    neighbor_ids = np.empty((len(positions), _NEIGHBORS), dtype=np.int64)
    distances = np.empty((len(positions), _NEIGHBORS))
    for start in range(0, len(positions), _ROWS):
        block = positions[start : start + _ROWS]
        neighbors = searcher.nearest_indexed(searcher.vectors(block), _NEIGHBORS + 1, alive)
        # The item itself is removed; if equal vectors crowd it out, the farthest neighbor is.
        scores = np.where(neighbors.ids == block[:, None], -np.inf, neighbors.scores)
        nearest = np.argsort(-scores, axis=1, kind="stable")[:, :_NEIGHBORS]
        rows = slice(start, start + len(block))
        neighbor_ids[rows] = index_of[np.take_along_axis(neighbors.ids, nearest, axis=1)]
        cosines = np.take_along_axis(scores, nearest, axis=1)
        distances[rows] = np.sqrt(np.maximum(0.0, 2 - 2 * cosines))
        advance(len(block))
    return neighbor_ids, distances


def _check_installed() -> None:
    try:
        import openTSNE  # noqa: F401
    except ImportError as error:
        raise ConfigInvalid(
            "a layout by t-SNE needs openTSNE, which is not installed",
            remedy=f"{install_command('layout')}, or leave --layout out: the map is by PCA then",
        ) from error
