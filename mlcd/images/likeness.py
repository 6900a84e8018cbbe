"""Measures the likeness of two pictures, to detect scaled, compressed, cropped, mirrored or
recolored copies.

Pictures are compared by the correlation of their spectra (DCT of the gray picture, each coefficient
times its frequency, so that edges count and brightness does not). First, one whole picture is
compared with many views of the other, whole and cropped, at 24 x 24 pixels; pairs that pass are
compared at 64 x 64 in the best view. docs/explanation/collections.md has the figures.

Shapes: N pictures, V views, S side, K coefficients a side, E pairs.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COARSE_SIDE: Final = 24
FINE_SIDE: Final = 64
# chosen on copies of 200 photographs against pairs of 3,000 products
LEAST_COARSE: Final = 0.9
LEAST_FINE: Final = 0.95
_COARSE: Final = (16, 12)  # samples and coefficients a side
_FINE: Final = (32, 28)
# side of a view as a share of the picture's side, and number of positions along each side
_CROPS: Final = ((1.0, 1), (0.97, 3), (0.94, 3), (0.91, 5), (0.88, 5))
_STEPS: Final = (0.02, 0.01, 0.005)
_MOVES: Final = ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1))
_LEAST_SHARE: Final = 0.85

Gray = NDArray[np.uint8]
Floats = NDArray[np.float32]


def gray_picture(data: bytes, side: int) -> Gray:
    """Returns a thumbnail in gray, resized to [S, S]."""
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("L").resize((side, side), Image.Resampling.BILINEAR))


@dataclass(frozen=True)
class Fits:
    """The best fit of one picture to others, [E] each.

    scores: correlations. views: index of the best view. mirrored: whether the view fits the mirror
    image.
    """

    scores: Floats
    views: NDArray[np.int64]
    mirrored: NDArray[np.bool_]


def coarse_spectra(pictures: Gray) -> Floats:
    """Returns the spectra of whole pictures, [N, S, S] to [N, K * K]."""
    axis = _window_spectra(np.zeros(1), np.ones(1), COARSE_SIDE, _COARSE)[0]
    return _weigh(axis @ pictures.astype(np.float32) @ axis.T, _COARSE)


def coarse_views(pictures: Gray) -> Floats:
    """Returns the spectra of all views of each picture, [N, S, S] to [N, V, K * K]."""
    pixels, side = pictures.astype(np.float32), _COARSE[1]
    views = []
    for share, num in _CROPS:
        starts = np.linspace(0, 1 - share, num)
        windows = _window_spectra(starts, np.full(num, share), COARSE_SIDE, _COARSE)
        flat = windows.reshape(num * side, COARSE_SIDE)
        crossed = (flat @ pixels @ flat.T).reshape(-1, num, side, num, side)
        views.append(crossed.transpose(0, 1, 3, 2, 4).reshape(-1, num * num, side, side))
    return _weigh(np.concatenate(views, axis=1), _COARSE)


def best_fits(views: Floats, spectra: Floats) -> Fits:
    """Compares the views of one picture, [V, K * K], with whole pictures, [E, K * K]."""
    both = np.stack([views @ spectra.T, views @ (spectra * _mirror(_COARSE[1])).T])
    flat = both.reshape(-1, both.shape[-1])
    best = flat.argmax(axis=0)
    scores = np.take_along_axis(flat, best[None], axis=0)[0]
    return Fits(scores, best % len(views), best >= len(views))


def fine_scores(parts: Gray, wholes: Gray, views: NDArray[np.int64]) -> Floats:
    """Returns the correlation of each pair, [E], [E, S, S] each; moves and scales the view of the
    part until it fits best.

    views: the best views of the coarse comparison. Mirrored wholes are given as their mirror image.
    """
    places = _view_places()[views]
    pixels = parts.astype(np.float32)
    axis = _window_spectra(np.zeros(1), np.ones(1), FINE_SIDE, _FINE)[0]
    targets = _weigh(axis @ wholes.astype(np.float32) @ axis.T, _FINE)

    def score(places: NDArray[np.float64]) -> Floats:
        share, y, x = places.T
        rows = _window_spectra(y, share, FINE_SIDE, _FINE)
        columns = _window_spectra(x, share, FINE_SIDE, _FINE)
        spectra = _weigh(rows @ pixels @ columns.transpose(0, 2, 1), _FINE)
        correlations: Floats = np.einsum("ek,ek->e", spectra, targets)
        return correlations

    best = score(places)
    for step in _STEPS:
        for scaled, down, right in _MOVES:
            moved = places.copy()
            moved[:, 0] = np.clip(places[:, 0] + scaled * step, _LEAST_SHARE, 1)
            centered = (places[:, 0] - moved[:, 0]) / 2
            room = 1 - moved[:, 0]
            moved[:, 1] = np.clip(places[:, 1] + centered + down * step, 0, room)
            moved[:, 2] = np.clip(places[:, 2] + centered + right * step, 0, room)
            scores = score(moved)
            better = scores > best
            places[better], best[better] = moved[better], scores[better]
    return best


@cache
def _view_places() -> NDArray[np.float64]:
    """Returns share, top and left of each view, [V, 3]."""
    return np.array(
        [
            (share, y, x)
            for share, num in _CROPS
            for y in np.linspace(0, 1 - share, num)
            for x in np.linspace(0, 1 - share, num)
        ]
    )


def _window_spectra(
    starts: NDArray[np.float64], shares: NDArray[np.float64], side: int, sizes: Sequence[int]
) -> Floats:
    """Returns the matrices that turn a line of pixels into the spectrum of a window, [E, K, S]."""
    samples, num = sizes
    pixels = np.arange(side)
    edges = side * (starts[:, None] + shares[:, None] * np.arange(samples + 1) / samples)
    covered = np.minimum(edges[:, 1:, None], pixels + 1) - np.maximum(edges[:, :-1, None], pixels)
    covered = np.maximum(covered, 0)
    means = covered / covered.sum(axis=-1, keepdims=True)
    spectra: Floats = (_cosine_basis(samples, num) @ means).astype(np.float32)
    return spectra


@cache
def _cosine_basis(samples: int, num: int) -> NDArray[np.float64]:
    """Returns the first rows of the orthonormal DCT-II, [num, samples]."""
    angles = np.pi * np.arange(num)[:, None] * (2 * np.arange(samples) + 1) / (2 * samples)
    basis: NDArray[np.float64] = np.sqrt(2 / samples) * np.cos(angles)
    basis[0] /= np.sqrt(2)
    return basis


def _weigh(spectra: NDArray[np.floating], sizes: Sequence[int]) -> Floats:
    """Returns the coefficients times their frequency, of norm 1: [..., K, K] to [..., K * K].

    The mean has the frequency 0, so that brightness does not count. A picture of one color becomes
    zeros, and matches no picture.
    """
    at = np.arange(sizes[1])
    frequency = np.hypot(at[:, None], at).astype(np.float32)
    flat = (spectra * frequency).reshape(*spectra.shape[:-2], -1)
    lengths = np.linalg.norm(flat, axis=-1, keepdims=True)
    weighted: Floats = np.where(lengths > 1, flat / np.maximum(lengths, 1), 0)
    return weighted


def _mirror(num: int) -> Floats:
    """Returns the factors that turn a spectrum into the mirror image's spectrum, [K * K]."""
    signs = np.where(np.arange(num) % 2, -1, 1).astype(np.float32)
    return np.tile(signs, num)
