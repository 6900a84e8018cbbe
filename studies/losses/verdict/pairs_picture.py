"""The picture of the losses of pairs: retrieval by batch size, and gradient norms over a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from scipy.stats import sem

from studies.losses.scales.arms import BATCHES, PairArm, PairKind
from studies.losses.verdict.drawing import explain, panels_of
from studies.losses.verdict.evidence import Row, where

_LOSSES: Final[dict[PairKind, tuple[str, str]]] = {
    "clip": ("CLIP", "#1f5f99"),
    "siglip": ("SigLIP", "#b3541e"),
}
_LINES: Final = dict(zip(BATCHES[:: len(BATCHES) // 2], (":", "--", "-"), strict=True))


def draw_pairs(rows: Sequence[Row], path: Path) -> None:
    """Draws both panels; empty ones where there are no rows."""
    with panels_of(path, 2) as (by_batch, over_time):
        for kind, (title, color) in _LOSSES.items():
            own = {batch: where(rows, arm=PairArm(kind, batch).name) for batch in BATCHES}
            run = {batch: each for batch, each in own.items() if len(each) > 1}
            if run:
                _draw_retrieval(by_batch, run, title, color)
                _draw_norms(over_time, run, title, color)
        by_batch.set_xscale("log", base=2)
        by_batch.set_xlabel("pairs in a step", fontsize=8)
        by_batch.set_ylabel("recall at 1, both directions, %", fontsize=8)
        over_time.set_yscale("log")
        over_time.set_xlabel("share of the steps", fontsize=8)
        over_time.set_ylabel("norm of the gradient before clipping", fontsize=8)
        explain(by_batch)
        explain(over_time)


def _draw_retrieval(
    panel: Axes, by_batch: Mapping[int, Sequence[Row]], title: str, color: str
) -> None:
    values = [[100 * row["retrieval"] for row in rows] for rows in by_batch.values()]
    panel.errorbar(
        list(by_batch),
        [float(np.mean(each)) for each in values],
        yerr=[2 * float(sem(each)) for each in values],
        fmt="o-",
        markersize=3,
        linewidth=1,
        color=color,
        label=title,
    )


def _draw_norms(panel: Axes, by_batch: Mapping[int, Sequence[Row]], title: str, color: str) -> None:
    for batch, line in _LINES.items():
        if batch in by_batch:
            curve = np.mean([row["gradient_norms"] for row in by_batch[batch]], axis=0)
            share = (np.arange(len(curve)) + 0.5) / len(curve)
            panel.plot(share, curve, line, linewidth=1, color=color, label=f"{title}, {batch:,}")
