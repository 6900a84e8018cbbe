"""Writes the summary, the report, a histogram of sizes and the coarser levels of a clustering."""

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
# the histogram of cluster sizes; lengths in pixels
_BAR_SPACING: Final = 64  # a bar and its gap
_BAR_WIDTH: Final = 48
_MAX_BAR_HEIGHT: Final = 240
_MARGIN: Final = 48
_TEXT_COLOR: Final = "#1f2933"
_BAR_COLOR: Final = "#3b7ea1"


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
    """Writes report.json and sizes.png, and returns their fields of the summary."""
    members, classes = _select_named(assignment, class_names)
    histogram = size_histogram(result.sizes)
    fields: dict[str, Any] = {
        "sizes": [{"at_least": smallest, "clusters": count} for smallest, count in histogram],
        "intra_cluster_cosine": tightness(result.sizes, result.cosines),
        "near_duplicate_centers": near_duplicates(result.centers),
    }
    if classes:
        fields["ari"] = adjusted_rand_index(members, classes)
        fields["conflict_rate"] = conflict_rate(members, classes)
    draft.write_json(REPORT, summarize_clusters(result, assignment, class_names) | fields)
    with draft.write(PICTURE) as path:
        _draw_histogram(histogram, "clusters by number of members").save(path, format="PNG")
    return fields


def write_coarser(
    draft: Draft, result: KMeansResult, nums: Sequence[int], seed: int
) -> list[dict[str, Any]]:
    """Writes the coarser levels, and returns the field `levels` of the summary."""
    levels = build_levels(result.centers, result.sizes, result.cosines, nums, seed=seed)
    groups = composed(levels)
    write_levels(draft, result.sizes, groups, [level.centers for level in levels])
    return [
        {
            "clusters": len(level.centers),
            "objective": level.objective,
            "imbalance": imbalance(np.bincount(parents, weights=result.sizes)),
        }
        for level, parents in zip(levels, groups, strict=True)
    ]


def _draw_histogram(bins: Sequence[tuple[int, int]], title: str) -> Image.Image:
    """Draws one labeled bar for each (smallest value of the bin, count); needs only Pillow."""
    image = Image.new(
        "RGB",
        (2 * _MARGIN + _BAR_SPACING * max(len(bins), 4), _MAX_BAR_HEIGHT + 2 * _MARGIN),
        "white",
    )
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default()
    draw.text((_MARGIN, _MARGIN // 4), title, fill=_TEXT_COLOR, font=font)
    floor = _MARGIN + _MAX_BAR_HEIGHT
    tallest = max((count for _, count in bins), default=1) or 1
    for index, (smallest, count) in enumerate(bins):
        x = _MARGIN + index * _BAR_SPACING
        y = floor - round(_MAX_BAR_HEIGHT * count / tallest)
        draw.rectangle((x, y, x + _BAR_WIDTH, floor), fill=_BAR_COLOR)
        draw.text((x + _BAR_WIDTH / 2, y - 2), str(count), fill=_TEXT_COLOR, font=font, anchor="mb")
        next_smallest = bins[index + 1][0] if index + 1 < len(bins) else 2 * smallest
        label = (
            str(smallest) if next_smallest - smallest <= 1 else f"{smallest}-{next_smallest - 1}"
        )
        draw.text((x + _BAR_WIDTH / 2, floor + 6), label, fill=_TEXT_COLOR, font=font, anchor="mt")
    draw.line((_MARGIN, floor, image.width - _MARGIN, floor), fill=_TEXT_COLOR)
    return image
