"""The labels that an engine returns together with the embeddings of one request."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.exact_scores import exact_scores
from mlcd.types import Embeddings

_requested: ContextVar["EngineLabels | None"] = ContextVar("requested_labels", default=None)


class EngineLabels:
    """The nearest centers of embeddings, looked up by the exact bytes of an embedding.

    centers: digest of the requested centers. num_used: number of rows that needed no scan.
    """

    def __init__(self, centers: str) -> None:
        self.centers = centers
        self.num_used = 0
        self._labels: dict[bytes, tuple[NDArray[np.integer], NDArray[np.float64]]] = {}

    def __bool__(self) -> bool:
        return bool(self._labels)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Requests labels, within the context, from engines that have these centers."""
        token = _requested.set(self)
        try:
            yield
        finally:
            _requested.reset(token)

    def add(
        self,
        embedding: NDArray[np.float32],
        ids: NDArray[np.integer],
        similarities: NDArray[np.float64],
    ) -> None:
        """Adds one unit row [D] with the ids and float64 similarities of its nearest centers."""
        self._labels[embedding.tobytes()] = ids, similarities

    def of(
        self, embeddings: Embeddings, rows: Embeddings, centers: Embeddings, top: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64]]:
        """Returns the mask [N] of rows with at least `top` labels here, and their ids and float64
        scores [N, top].

        rows: embeddings in the space of the centers. Labels are omitted if their scores differ in
        any bit from our own computation: they would be those of another row or of other centers.
        """
        has_labels = np.zeros(len(rows), dtype=np.bool_)
        ids = np.full((len(rows), top), -1, dtype=np.int64)
        scores = np.full((len(rows), top), -np.inf)
        for row, embedding in enumerate(embeddings):
            labels = self._labels.get(embedding.tobytes())
            if labels is None or len(labels[0]) < top:
                continue
            center_ids, similarities = labels[0][:top].astype(np.int64), labels[1][:top]
            if center_ids.min() < 0 or center_ids.max() >= len(centers):
                continue
            exact = exact_scores(rows[row : row + 1], centers, np.zeros(top, np.int64), center_ids)
            if np.array_equal(exact, similarities):
                has_labels[row], ids[row], scores[row] = True, center_ids, exact
        self.num_used += int(has_labels.sum())
        return has_labels, ids, scores


def find_requested_labels() -> EngineLabels | None:
    """Returns the object that collects labels for the current request; None without one."""
    return _requested.get()
