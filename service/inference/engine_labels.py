"""The labels that an engine returns together with the embeddings of one request."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.exact_scores import exact_scores
from mlcd.types import Embeddings

_Labels: TypeAlias = tuple[NDArray[np.integer], NDArray[np.float64] | None]
_NO_LABELS: Final[_Labels] = (np.zeros(0, np.int32), None)
_requested: ContextVar["EngineLabels | None"] = ContextVar("requested_labels", default=None)


class EngineLabels:
    """The nearest centers of embeddings, looked up by the exact bytes of an embedding.

    centers: digest of the requested centers. top: labels of each row, at most the number of
    centers. num_used: number of rows that needed no scan.
    """

    def __init__(self, centers: str, top: int) -> None:
        self.centers, self.top = centers, top
        self.num_used = 0
        self._labels: dict[bytes, _Labels] = {}

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

    def knows(self, embedding: NDArray[np.float32]) -> bool:
        """Returns whether an engine has looked for the labels of a row [D]."""
        return embedding.tobytes() in self._labels

    def add(
        self,
        embedding: NDArray[np.float32],
        ids: NDArray[np.integer],
        similarities: NDArray[np.float64] | None = None,
    ) -> None:
        """Adds one unit row [D] with the ids of its nearest centers.

        similarities: float64, of an engine outside of this service, whose ids are not trusted.
        """
        self._labels[embedding.tobytes()] = ids, similarities

    def of(
        self, embeddings: Embeddings, rows: Embeddings, centers: Embeddings, top: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64]]:
        """Returns the mask [N] of rows with at least `top` labels here, and their ids and float64
        scores [N, top].

        rows: embeddings in the space of the centers. Labels are omitted if similarities differ in
        any bit from our own computation: they would be those of another row or of other centers.
        """
        has_labels = np.zeros(len(rows), dtype=np.bool_)
        ids = np.full((len(rows), top), -1, dtype=np.int64)
        scores = np.full((len(rows), top), -np.inf)
        known = [self._labels.get(embedding.tobytes(), _NO_LABELS) for embedding in embeddings]
        for row, (center_ids, _) in enumerate(known):
            if len(center_ids) >= top:
                ids[row] = center_ids[:top]
        chosen = np.flatnonzero((ids.min(axis=1) >= 0) & (ids.max(axis=1) < len(centers)))
        exact = exact_scores(rows, centers, np.repeat(chosen, top), ids[chosen].ravel())
        for row, own in zip(chosen.tolist(), exact.reshape(-1, top), strict=True):
            similarities = known[row][1]
            if similarities is None or np.array_equal(own, similarities[:top]):
                has_labels[row], scores[row] = True, own
        ids[~has_labels] = -1
        self.num_used += int(has_labels.sum())
        return has_labels, ids, scores


def find_requested_labels() -> EngineLabels | None:
    """Returns the object that collects labels for the current request; None without one."""
    return _requested.get()
