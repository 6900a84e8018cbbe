"""The measures of a clustering: the summary of its manifest, its report, a picture, and the coarser
levels.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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
from mlcd.pipelines.histogram import draw_histogram

REPORT: Final = "report.json"
PICTURE: Final = "sizes.png"


def summarized(
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
    members, classes = _known(assignment, class_names)
    if classes:
        summary["purity"] = purity(members, classes)
        summary["nmi"] = normalized_mutual_information(members, classes)
    return summary


def _known(
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
    members, classes = _known(assignment, class_names)
    histogram = size_histogram(result.sizes)
    extra: dict[str, Any] = {
        "sizes": [{"at_least": smallest, "clusters": count} for smallest, count in histogram],
        "intra_cluster_cosine": tightness(result.sizes, result.cosines),
        "near_duplicate_centers": near_duplicates(result.centers),
    }
    if classes:
        extra["ari"] = adjusted_rand_index(members, classes)
        extra["conflict_rate"] = conflict_rate(members, classes)
    draft.write_json(REPORT, summarized(result, assignment, class_names) | extra)
    with draft.write(PICTURE) as path:
        draw_histogram(histogram, "clusters by number of members").save(path, format="PNG")
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
