"""The picture of the losses of pairs: retrieval by batch size, and gradient norms over a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from scipy.stats import sem

from studies.losses.scales.arms import BATCHES
from studies.losses.verdict.drawing import explain, panels_of
from studies.losses.verdict.evidence import Row, where

_LOSSES: Final = {"clip": ("CLIP", "#1f5f99"), "siglip": ("SigLIP", "#b3541e")}
_LINES: Final = dict(zip(BATCHES[:: len(BATCHES) // 2], (":", "--", "-"), strict=True))


def draw_pairs(rows: Sequence[Row], path: Path) -> None:
    """Draws both panels; empty ones where there are no rows."""
    with panels_of(path, 2) as (by_batch, over_time):
        for loss in _LOSSES:
            own = where(rows, loss=loss)
            if own:
                _draw_retrieval(by_batch, own, loss)
                _draw_norms(over_time, own, loss)
        by_batch.set_xscale("log", base=2)
        by_batch.set_xlabel("pairs in a step", fontsize=8)
        by_batch.set_ylabel("recall at 1, both directions, %", fontsize=8)
        over_time.set_yscale("log")
        over_time.set_xlabel("share of the steps", fontsize=8)
        over_time.set_ylabel("norm of the gradient before clipping", fontsize=8)
        explain(by_batch)
        explain(over_time)


def _draw_retrieval(panel: Axes, rows: Sequence[Row], loss: str) -> None:
    title, color = _LOSSES[loss]
    values = {
        batch: [100 * row["retrieval"] for row in where(rows, batch=batch)] for batch in BATCHES
    }
    run = {batch: each for batch, each in values.items() if len(each) > 1}
    panel.errorbar(
        list(run),
        [float(np.mean(each)) for each in run.values()],
        yerr=[2 * float(sem(each)) for each in run.values()],
        fmt="o-",
        markersize=3,
        linewidth=1,
        color=color,
        label=title,
    )


def _draw_norms(panel: Axes, rows: Sequence[Row], loss: str) -> None:
    title, color = _LOSSES[loss]
    for batch, line in _LINES.items():
        if own := where(rows, batch=batch):
            curve = np.mean([row["gradient_norms"] for row in own], axis=0)
            share = (np.arange(len(curve)) + 0.5) / len(curve)
            panel.plot(share, curve, line, linewidth=1, color=color, label=f"{title}, {batch:,}")
