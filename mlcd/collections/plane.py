"""The layout of a collection: a point in the plane for every item.

    layout/tsne.npz    points by row of the ledger, where `mlcd index --layout tsne` made them
    layout/about.json  how they were made

Without tsne.npz the layout is the projection on the first two principal components (PCA),
computed on demand. Items added after a stored layout was made are placed between their nearest
placed neighbors. Items are ordered by a hash of their row, so a prefix is a random sample that does
not depend on the request. Shapes: N items, D dimension.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import write_synced
from mlcd.collections.by_row import ByRow, Compute, read_by_row, write_by_row
from mlcd.collections.searcher import Searcher
from mlcd.randomness import hash_counters
from mlcd.types import Embeddings

LAYOUT: Final = "layout"
Method = Literal["pca", "tsne"]
_ABOUT: Final = "about.json"
_POINTS: Final = np.empty((0, 2), dtype=np.float32)
# Items used for the principal components; more items would move points by less than a pixel.
_SAMPLE: Final = 20_000
# Share of the sample inside the square; points farther out are clipped to its edge.
_WITHIN: Final = 0.999
_NEIGHBORS: Final = 8
# A stored layout is used if it has at least this share of the items.
_LEAST_PLACED: Final = 0.5


@dataclass(frozen=True)
class Plane:
    """The layout of one state of a collection.

    positions: int64 [N], position of each item in the state. points: float32 [N, 2], in [-1, 1].
    """

    state: Searcher
    method: Method
    positions: NDArray[np.int64]
    points: NDArray[np.float32]

    @cached_property
    def digest(self) -> str:
        """Returns a digest of the method, the order and the points: 16 hexadecimal digits."""
        sha256 = hashlib.sha256(self.method.encode())
        sha256.update(self.state.rows[self.positions].tobytes())
        sha256.update(self.points.tobytes())
        return sha256.hexdigest()[:16]

    def inside(self, corners: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns the indices of the points inside a polygon [E, 2], by the even-odd rule."""
        low, high = corners.min(axis=0), corners.max(axis=0)
        near = np.flatnonzero(((self.points >= low) & (self.points <= high)).all(axis=1))
        x, y = self.points[near].astype(np.float64).T
        odd = np.zeros(len(near), dtype=np.bool_)
        for (x1, y1), (x2, y2) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
            if y1 != y2:
                crossed = (y1 <= y) != (y2 <= y)
                odd ^= crossed & (x < x1 + (y - y1) * (x2 - x1) / (y2 - y1))
        return near[odd]


@dataclass(frozen=True)
class Projection:
    """A projection on two principal components. mean: [D]. components: [2, D]. scale: a number."""

    mean: Embeddings
    components: Embeddings
    scale: float

    @classmethod
    def of(cls, sample: Embeddings) -> "Projection":
        """Returns the projection fitted to a sample [n, D], with deterministic signs."""
        mean = sample.sum(axis=0) / max(1, len(sample))
        centered = (sample - mean).astype(np.float64)
        _, vectors = np.linalg.eigh(centered.T @ centered)
        components = vectors[:, ::-1][:, :2].T
        largest = np.abs(components).argmax(axis=1)
        components = components * np.sign(components[np.arange(len(components)), largest])[:, None]
        spread = np.abs(centered @ components.T)
        reach = float(np.quantile(spread, _WITHIN)) if spread.size else 0.0
        return cls(mean, components.astype(np.float32), reach or 1.0)

    def points(self, vectors: Embeddings) -> NDArray[np.float32]:
        """Returns the points of vectors, [n, 2] in [-1, 1]."""
        points = np.zeros((len(vectors), 2), dtype=np.float32)
        projected = (vectors - self.mean) @ self.components.T / np.float32(self.scale)
        points[:, : projected.shape[1]] = np.clip(projected, -1, 1)
        return points


class Placer:
    """Caches the points of a collection's items. Not thread-safe."""

    def __init__(self, folder: Path | None) -> None:
        """folder: the collection's folder; None if it cannot have a stored layout."""
        self._folder = None if folder is None else folder / LAYOUT
        self._key: object = None
        self._points = ByRow.empty(_POINTS)
        self._method: Method = "pca"

    def layout(self, searcher: Searcher) -> Plane:
        """Returns the layout of a state; computes only the points of new items.

        The projection is fitted again for each generation of the index, and when the number of
        items has doubled.
        """
        positions = order_by_hash(searcher)
        key = (searcher.generation.number, searcher.num_positions.bit_length())
        if key != self._key:
            self._start_layout(searcher, positions)
            self._key = key
        self._points = self._points.extend(searcher, self._compute)
        points = self._points.at(searcher.rows[positions])
        return Plane(searcher, self._method, positions, points)

    def _start_layout(self, searcher: Searcher, positions: NDArray[np.int64]) -> None:
        """Chooses between the stored layout and a new projection."""
        stored = (
            ByRow.empty(_POINTS)
            if self._folder is None
            else read_by_row(self._folder / "tsne.npz", _POINTS)
        )
        num_placed = len(positions) - stored.num_missing(searcher.rows[positions])
        if len(stored.rows) and num_placed >= _LEAST_PLACED * len(positions):
            self._method, self._points = "tsne", stored
            self._compute: Compute = _Interpolation(searcher, stored).points
        else:
            self._method, self._points = "pca", ByRow.empty(_POINTS)
            self._compute = Projection.of(searcher.vectors(positions[:_SAMPLE])).points


class _Interpolation:
    """Places vectors at the mean of their nearest placed neighbors, weighted by similarity."""

    def __init__(self, searcher: Searcher, placed: ByRow) -> None:
        self._searcher = searcher
        rows = searcher.generation.rows
        self._is_placed = np.isin(rows, placed.rows)
        self._points = np.zeros((len(rows), 2), dtype=np.float32)
        self._points[self._is_placed] = placed.at(rows[self._is_placed])

    def points(self, vectors: Embeddings) -> NDArray[np.float32]:
        if not self._is_placed.any():
            return np.zeros((len(vectors), 2), dtype=np.float32)
        nearest = self._searcher.nearest_indexed(vectors, _NEIGHBORS, self._is_placed)
        weights = np.where(nearest.ids >= 0, np.maximum(nearest.scores, 1e-6), 0).astype(np.float32)
        weights /= weights.sum(axis=1, keepdims=True)
        points: NDArray[np.float32] = np.einsum("nk,nkd->nd", weights, self._points[nearest.ids])
        return points


def order_by_hash(searcher: Searcher) -> NDArray[np.int64]:
    """Returns the positions of all items, ordered by a hash of their row in the ledger."""
    positions = np.flatnonzero(searcher.alive)
    return positions[np.argsort(hash_counters(searcher.rows[positions]), kind="stable")]


def write_layout(folder: Path, points: ByRow, about: Mapping[str, Any]) -> None:
    """Stores the layout that `mlcd index` made of a collection."""
    write_by_row(folder / LAYOUT / "tsne.npz", points)
    write_synced(folder / LAYOUT / _ABOUT, (json.dumps(about, sort_keys=True) + "\n").encode())


def read_about(folder: Path) -> dict[str, Any]:
    """Returns how the stored layout was made; empty without a stored layout."""
    try:
        about: dict[str, Any] = json.loads((folder / LAYOUT / _ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return about


def remove_layout(folder: Path) -> None:
    """Removes the stored layout, so that the projection is used again."""
    for name in (_ABOUT, "tsne.npz"):
        (folder / LAYOUT / name).unlink(missing_ok=True)


def fit_square(points: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Returns points [N, 2] centered and scaled to [-1, 1], with one scale for both axes."""
    low, high = points.min(axis=0), points.max(axis=0)
    reach = float((high - low).max()) / 2 or 1.0
    moved: NDArray[np.float32] = np.clip((points - (low + high) / 2) / reach, -1, 1)
    return moved.astype(np.float32)
