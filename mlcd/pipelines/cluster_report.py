"""The measures of a clustering: the summary of its manifest, its report, a picture, and the coarser
levels.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mlcd.artifacts.center_levels import write_levels
from mlcd.artifacts.draft import Draft
from mlcd.clustering.kmeans import KMeansResult
from mlcd.clustering.levels import build_levels, composed
from mlcd.clustering.quality import (
    adjusted_rand_index,
    conflict_rate,
    imbalance,
    near_duplicates,
    normalized_mutual_information,
    purity,
    size_histogram,
    tightness,
)

REPORT: Final = "report.json"
PICTURE: Final = "sizes.png"
# The picture of the sizes.
_WIDTH: Final = 64  # pixels of a bar and its gap
_BAR: Final = 48
_HEIGHT: Final = 240  # pixels of the tallest bar
_MARGIN: Final = 48
_INK: Final = "#1f2933"
_FILL: Final = "#3b7ea1"


def summarize_clusters(
    result: KMeansResult, assignment: NDArray[np.int32], class_names: Sequence[str | None]
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "rows": len(assignment),
        "clusters": len(result.centers),
        "objective": result.objective[-1],
        "objective_history": list(result.objective),
        "imbalance": imbalance(result.sizes),
        "smallest": int(result.sizes.min()),
        "largest": int(result.sizes.max()),
        "empty": int((result.sizes == 0).sum()),
        "splits": result.num_splits,
    }
    members, classes = _select_named(assignment, class_names)
    if classes:
        summary["purity"] = purity(members, classes)
        summary["nmi"] = normalized_mutual_information(members, classes)
    return summary


def _select_named(
    assignment: NDArray[np.int32], class_names: Sequence[str | None]
) -> tuple[NDArray[np.int32], list[str]]:
    rows = [row for row, name in enumerate(class_names) if name is not None]
    return assignment[rows], [str(class_names[row]) for row in rows]


def write_report(
    draft: Draft,
    result: KMeansResult,
    assignment: NDArray[np.int32],
    class_names: Sequence[str | None],
) -> dict[str, Any]:
    """Writes report.json and sizes.png, and returns their part of the summary."""
    members, classes = _select_named(assignment, class_names)
    histogram = size_histogram(result.sizes)
    extra: dict[str, Any] = {
        "sizes": [{"at_least": smallest, "clusters": count} for smallest, count in histogram],
        "intra_cluster_cosine": tightness(result.sizes, result.cosines),
        "near_duplicate_centers": near_duplicates(result.centers),
    }
    if classes:
        extra["ari"] = adjusted_rand_index(members, classes)
        extra["conflict_rate"] = conflict_rate(members, classes)
    draft.write_json(REPORT, summarize_clusters(result, assignment, class_names) | extra)
    with draft.write(PICTURE) as path:
        _draw_histogram(histogram, "clusters by number of members").save(path, format="PNG")
    return extra


def write_coarser(
    draft: Draft, result: KMeansResult, nums: Sequence[int], seed: int
) -> list[dict[str, Any]]:
    """Writes the coarser levels and returns their part of the summary."""
    levels = build_levels(result.centers, result.sizes, result.cosines, nums, seed=seed)
    groups = composed(levels)
    write_levels(draft, result.sizes, groups, [level.centers for level in levels])
    return [
        {
            "clusters": len(level.centers),
            "objective": level.objective,
            "imbalance": imbalance(np.bincount(of, weights=result.sizes)),
        }
        for level, of in zip(levels, groups, strict=True)
    ]


def _draw_histogram(bins: Sequence[tuple[int, int]], title: str) -> Image.Image:
    """Draws one bar for each (smallest value of the bin, count), labeled with both.

    Pillow draws it: one picture needs no plotting library.
    """
    image = Image.new(
        "RGB", (2 * _MARGIN + _WIDTH * max(len(bins), 4), _HEIGHT + 2 * _MARGIN), "white"
    )
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default()
    draw.text((_MARGIN, _MARGIN // 4), title, fill=_INK, font=font)
    floor = _MARGIN + _HEIGHT
    tallest = max((count for _, count in bins), default=1) or 1
    for index, (smallest, count) in enumerate(bins):
        x = _MARGIN + index * _WIDTH
        y = floor - round(_HEIGHT * count / tallest)
        draw.rectangle((x, y, x + _BAR, floor), fill=_FILL)
        draw.text((x + _BAR / 2, y - 2), str(count), fill=_INK, font=font, anchor="mb")
        following = bins[index + 1][0] if index + 1 < len(bins) else 2 * smallest
        label = str(smallest) if following - smallest <= 1 else f"{smallest}-{following - 1}"
        draw.text((x + _BAR / 2, floor + 6), label, fill=_INK, font=font, anchor="mt")
    draw.line((_MARGIN, floor, image.width - _MARGIN, floor), fill=_INK)
    return image
