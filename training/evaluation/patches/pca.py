"""Patch features projected on their three principal components, as colors (Oquab et al. 2023).

Shapes: N images, P patches of each (rows of its grid from the top), W width.

The sign of a component is arbitrary, so it is chosen such that patches at the border, mostly
background, are on its negative side.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput

NUM: Final = 3
_TIE: Final = 1e-9  # relative to a component's standard deviation

_Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Components:
    """The principal components of a set of rows.

    mean: [W]. axes: [3, W], of unit length, by descending variance. shares: [3], shares of the
    total variance.
    """

    mean: _Rows
    axes: _Rows
    shares: _Rows

    def project(self, rows: _Rows) -> _Rows:
        """Returns the components [..., 3] of rows [..., W]."""
        projected: _Rows = (rows - self.mean) @ self.axes.T
        return projected


@dataclass(frozen=True)
class ColoredPatches:
    """The patches of all images as colors.

    colors: uint8 [N, P, 3], black for background patches. foreground: bool [N, P]. shares: the
    components' shares of the variance of the colored patches.
    """

    colors: NDArray[np.uint8]
    foreground: NDArray[np.bool_]
    shares: tuple[float, ...]


def border_of(side: int) -> NDArray[np.bool_]:
    """Returns a mask [side * side] of the patches at the border of a grid."""
    border = np.ones((side, side), dtype=np.bool_)
    border[1:-1, 1:-1] = False
    return border.reshape(-1)


def components(rows: _Rows, border: NDArray[np.bool_]) -> Components:
    """Returns the principal components of rows [n, W].

    border: bool [n], rows that should be on the negative side. Raises InvalidInput for W below 3 or
    equal rows.
    """
    mean = rows.mean(axis=0)
    centered = rows - mean
    variances, vectors = np.linalg.eigh(centered.T @ centered / len(rows))
    variances, axes = variances[::-1][:NUM], vectors.T[::-1][:NUM]
    total = float(np.square(centered).sum() / len(rows))
    if len(axes) < NUM or not total > 0:
        raise InvalidInput("the patches are all equal", remedy="give other images")
    signs = [
        _sign(axis, centered[border] @ axis, float(np.sqrt(max(variance, 0.0))))
        for axis, variance in zip(axes, variances, strict=True)
    ]
    return Components(mean, axes * np.array(signs)[:, None], variances / total)


def _sign(axis: _Rows, at_border: _Rows, deviation: float) -> float:
    """Returns the sign that puts the border on the negative side of an axis.

    If the border's mean is 0, the sign makes the largest entry of the axis positive.
    """
    mean = float(at_border.mean()) if len(at_border) else 0.0
    if abs(mean) > _TIE * deviation:
        return -1.0 if mean > 0 else 1.0
    return 1.0 if axis[np.abs(axis).argmax()] > 0 else -1.0


def color_patches(patches: NDArray[np.floating], side: int, *, foreground: bool) -> ColoredPatches:
    """Returns the patches [N, P, W] of grids of `side` as colors; P is side squared.

    Each component is scaled from its smallest to its largest value. foreground: color only patches
    on the positive side of the first component, by their own components. Raises InvalidInput if
    all patches are equal.
    """
    rows = patches.astype(np.float64)
    border = np.broadcast_to(border_of(side), rows.shape[:2])
    is_colored = np.ones(rows.shape[:2], dtype=np.bool_)
    principal = components(rows.reshape(-1, rows.shape[-1]), border.reshape(-1))
    if foreground:
        is_colored = principal.project(rows)[..., 0] > 0
        principal = components(rows[is_colored], border[is_colored])
    values = principal.project(rows[is_colored])
    low, high = values.min(axis=0), values.max(axis=0)
    spread = np.where(high > low, high - low, 1.0)
    colors = np.zeros((*rows.shape[:2], NUM), dtype=np.uint8)
    colors[is_colored] = np.rint(255 * (values - low) / spread)
    return ColoredPatches(colors, is_colored, tuple(principal.shares.tolist()))
