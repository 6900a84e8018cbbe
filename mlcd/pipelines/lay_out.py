"""Computes a slow, better layout of a collection: t-SNE. Requires the extra `layout`.

The neighbors are exact up to 50,000 items; beyond that, the collection's index finds them. With
one thread and a fixed seed, the same items get the same layout.
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
_NUM_NEIGHBORS: Final = 3 * _PERPLEXITY
_EARLY_ITERATIONS: Final = 250  # with exaggeration
_LATE_ITERATIONS: Final = 500
_EXAGGERATION: Final = 12
_ITERATIONS_PER_REPORT: Final = 50
_ROWS_PER_BLOCK: Final = 1024
_INITIAL_DEVIATION: Final = 1e-4


def make_layout(path: Path, method: Method, reporter: Stages) -> None:
    """Writes the layout of the collection at `path`. `pca` removes a stored layout, because the PCA
    layout is computed on demand.

    Does nothing if a layout of the same items with the same settings exists.
    Raises ConfigInvalid if the extra is not installed, InvalidInput for too few items.
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
        settings = {
            "method": method,
            "seed": _SEED,
            "perplexity": _PERPLEXITY,
            "generation": searcher.generation.number,
            "items": len(rows),
        }
        if read_about(path) == settings:
            return
        if len(rows) <= _NUM_NEIGHBORS:
            raise InvalidInput(
                f"t-SNE needs more than {_NUM_NEIGHBORS} items, got {len(rows)}",
                remedy="add items, or leave --layout out",
            )
        order = np.argsort(searcher.rows[np.flatnonzero(searcher.alive)])
        positions = np.flatnonzero(searcher.alive)[order]
        points = _compute_layout(searcher, positions, reporter)
        write_layout(path, ByRow(rows, fit_square(points)), settings)


def _compute_layout(
    searcher: Searcher, positions: NDArray[np.int64], reporter: Stages
) -> NDArray[np.float64]:
    from openTSNE import TSNEEmbedding
    from openTSNE.affinity import PerplexityBasedNN
    from openTSNE.nearest_neighbors import PrecomputedNeighbors

    with reporter.stage("neighbors", len(positions)) as meter:
        neighbor_indices, distances = _find_neighbors(searcher, positions, meter.advance)
    affinities = PerplexityBasedNN(
        perplexity=_PERPLEXITY,
        knn_index=PrecomputedNeighbors(neighbor_indices, distances),
        n_jobs=1,
    )
    vectors = searcher.vectors(positions)
    initial = Projection.of(vectors).points(vectors).astype(np.float64)
    initial *= _INITIAL_DEVIATION / (initial[:, 0].std() or 1.0)
    with reporter.stage("layout", _EARLY_ITERATIONS + _LATE_ITERATIONS) as meter:

        def report_progress(*_: object) -> None:
            meter.advance(_ITERATIONS_PER_REPORT)

        points: Any = TSNEEmbedding(
            initial,
            affinities,
            random_state=_SEED,
            n_jobs=1,
            callbacks=report_progress,
            callbacks_every_iters=_ITERATIONS_PER_REPORT,
        )
        points = points.optimize(n_iter=_EARLY_ITERATIONS, exaggeration=_EXAGGERATION, momentum=0.5)
        points = points.optimize(n_iter=_LATE_ITERATIONS, momentum=0.8)
    return np.asarray(points, dtype=np.float64)


def _find_neighbors(
    searcher: Searcher, positions: NDArray[np.int64], advance: Callable[[int], None]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns each item's nearest neighbors, as indices into `positions`, and their distances."""
    index_of = np.full(searcher.num_positions, -1, dtype=np.int64)
    index_of[positions] = np.arange(len(positions))
    alive = searcher.alive[: searcher.num_indexed]
    neighbor_indices = np.empty((len(positions), _NUM_NEIGHBORS), dtype=np.int64)
    distances = np.empty((len(positions), _NUM_NEIGHBORS))
    for start in range(0, len(positions), _ROWS_PER_BLOCK):
        block = positions[start : start + _ROWS_PER_BLOCK]
        neighbors = searcher.nearest_indexed(searcher.vectors(block), _NUM_NEIGHBORS + 1, alive)
        # Removes the item itself; if equal vectors crowd it out, the farthest neighbor instead.
        scores = np.where(neighbors.ids == block[:, None], -np.inf, neighbors.scores)
        nearest = np.argsort(-scores, axis=1, kind="stable")[:, :_NUM_NEIGHBORS]
        rows = slice(start, start + len(block))
        neighbor_indices[rows] = index_of[np.take_along_axis(neighbors.ids, nearest, axis=1)]
        cosines = np.take_along_axis(scores, nearest, axis=1)
        distances[rows] = np.sqrt(np.maximum(0.0, 2 - 2 * cosines))
        advance(len(block))
    return neighbor_indices, distances


def _check_installed() -> None:
    try:
        import openTSNE  # noqa: F401
    except ImportError as error:
        raise ConfigInvalid(
            "a layout by t-SNE needs openTSNE, which is not installed",
            remedy=f"{install_command('layout')}, or leave --layout out to get the map by PCA",
        ) from error
