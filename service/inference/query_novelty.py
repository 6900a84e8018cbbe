"""The novelty of recent queries: how many lie beyond the quantile of their nearest center."""

import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

_RECENT: Final = 10_000  # images, the latest of this process


class QueryNovelty:
    """The centers of the latest images that were looked up, and whether each lies beyond the
    distance within which most members of its cluster lie.
    """

    def __init__(self, quantiles: NDArray[np.float32]) -> None:
        """quantiles: [K], the distances, 1 - cosine."""
        self._quantiles = quantiles
        self._centers = np.full(_RECENT, -1, np.int32)
        self._beyond = np.zeros(_RECENT, np.bool_)
        self._seen = 0
        self._changing = threading.Lock()

    def add(self, centers: NDArray[np.integer], similarities: NDArray[np.float32]) -> int:
        """Adds images by their nearest centers, and returns how many lie beyond."""
        beyond = 1 - similarities > self._quantiles[centers]
        latest = slice(-_RECENT, None)
        centers, recent = centers[latest], beyond[latest]
        with self._changing:
            places = (self._seen + np.arange(len(centers))) % _RECENT
            self._centers[places], self._beyond[places] = centers, recent
            self._seen += len(centers)
        return int(beyond.sum())

    def by_center(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns how many of the recent images each center has, and how many of these lie beyond,
        [K] each.
        """
        with self._changing:
            known = self._centers >= 0
            centers, beyond = self._centers[known], self._beyond[known]
        num = len(self._quantiles)
        return np.bincount(centers, minlength=num), np.bincount(centers[beyond], minlength=num)
