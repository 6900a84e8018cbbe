"""Draws a suite as an SVG radar chart: an axis for each data set, a ring for each model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

_COLORS: Final = ("#1f5f99", "#b3541e", "#3d7a3d", "#7a3d7a", "#8a7a1e", "#555555")
_RADIUS: Final = 200.0
_MARGIN: Final = 120.0
_LINE: Final = 18.0
_RINGS: Final = (25, 50, 75, 100)
MIN_AXES: Final = 3

_Point = tuple[float, float]


def radar(axes: Sequence[str], rings: Mapping[str, Sequence[float | None]]) -> str:
    """Returns the chart as SVG.

    axes: names of the data sets, at least MIN_AXES. rings: by model, a value in 0..1 for each axis;
    None is skipped.
    """
    side = 2 * (_RADIUS + _MARGIN)
    height = side + _LINE * len(rings)
    drawn = (_ring(index, values) for index, values in enumerate(rings.values()))
    size = f'viewBox="0 0 {side:g} {height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="{side:g}" height="{height:g}" fill="#ffffff"/>',
        *_grid(axes),
        *drawn,
        *_legend(list(rings), side),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _at(axis: int, num: int, share: float) -> _Point:
    angle, center = 2 * math.pi * axis / num, _RADIUS + _MARGIN
    return (
        center + share * _RADIUS * math.sin(angle),
        center - share * _RADIUS * math.cos(angle),
    )


def _points(points: Sequence[_Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _grid(axes: Sequence[str]) -> Iterator[str]:
    num = len(axes)
    for percent in _RINGS:
        ring = _points([_at(axis, num, percent / 100) for axis in range(num)])
        yield f'<polygon points="{ring}" fill="none" stroke="#cccccc"/>'
        x, y = _at(0, num, percent / 100)
        yield f'<text x="{x + 3:.1f}" y="{y - 2:.1f}" fill="#888888">{percent}</text>'
    for axis, name in enumerate(axes):
        (x0, y0), (x1, y1) = _at(axis, num, 0), _at(axis, num, 1)
        yield f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#cccccc"/>'
        x, y = _at(axis, num, 1.1)
        anchor = "middle" if abs(x - x0) < 1 else "start" if x > x0 else "end"
        yield f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(name)}</text>'


def _ring(index: int, values: Sequence[float | None]) -> str:
    shown = [
        _at(axis, len(values), share) for axis, share in enumerate(values) if share is not None
    ]
    color = _COLORS[index % len(_COLORS)]
    return (
        f'<polygon points="{_points(shown)}" fill="{color}" fill-opacity="0.08" stroke="{color}"/>'
    )


def _legend(names: Sequence[str], top: float) -> Iterator[str]:
    for index, name in enumerate(names):
        y = top + _LINE * index
        color = _COLORS[index % len(_COLORS)]
        yield f'<rect x="20" y="{y - 9:g}" width="10" height="10" fill="{color}"/>'
        yield f'<text x="36" y="{y:g}">{escape(name)}</text>'
