"""The report's pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from studies.losses.arms import UNTRAINED
from studies.losses.numbers import Curve, Differences
from studies.losses.statistics import MIN_PAIRS

mpl.use("agg")

_COLORS: Final = ("#1f5f99", "#b3541e", "#3d7a3d", "#7a3d7a", "#8a7a1e")


def draw_differences(found: Differences, path: Path) -> None:
    """Draws MLCD minus each opponent with its interval, in points; pairs without one are absent."""
    titles = list(found)
    figure, axes = plt.subplots(figsize=(7, 0.42 * len(titles) + 1))
    arms = list(next(iter(found.values())))
    for number, (arm, color) in enumerate(zip(arms, _COLORS, strict=False)):
        rows = [row for row, title in enumerate(titles) if found[title][arm].n >= MIN_PAIRS]
        shown = [found[titles[row]][arm] for row in rows]
        axes.errorbar(
            [100 * each.mean for each in shown],
            [row + 0.66 * ((number + 0.5) / len(arms) - 0.5) for row in rows],
            xerr=[100 * each.half_width for each in shown],
            fmt="o",
            markersize=3,
            capsize=2,
            color=color,
            label=f"mlcd - {arm}",
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(titles)), titles, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("points of accuracy (mAP), mean and 95 % interval over seeds")
    axes.legend(fontsize=7)
    _save(figure, path)


def draw_cosines(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draws positive and negative cosines over the steps, one line for each seed."""
    figure, panels = plt.subplots(1, 2, figsize=(7, 2.6))
    for panel, (index, title) in zip(panels, ((1, "positives"), (2, "negatives")), strict=True):
        for (arm, runs), color in zip(curves.items(), _COLORS, strict=False):
            for number, curve in enumerate(runs):
                steps, values = [point[0] for point in curve], [point[index] for point in curve]
                panel.plot(steps, values, color=color, linewidth=1, label=None if number else arm)
        panel.set_title(f"mean cosine of {title}", fontsize=9)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.legend(fontsize=7)
    _save(figure, path)


def draw_clusters(by_metric: Mapping[str, Mapping[str, Mapping[int, float]]], path: Path) -> None:
    """Draws a panel for each metric: each arm's percentage by number of clusters, and the untrained
    tower's.
    """
    figure, panels = plt.subplots(1, len(by_metric), figsize=(7, 2.8))
    for panel, (title, by_arm) in zip(panels, by_metric.items(), strict=True):
        for (arm, by_clusters), color in zip(by_arm.items(), ("black", *_COLORS), strict=False):
            style = "--" if arm == UNTRAINED else "o-"
            values = [100 * value for value in by_clusters.values()]
            panel.plot(
                list(by_clusters), values, style, color=color, linewidth=1, markersize=3, label=arm
            )
        panel.set_xscale("log")
        every = sorted(set().union(*by_arm.values()))
        panel.set_xticks(every, [f"{clusters:,}" for clusters in every])
        panel.minorticks_off()
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("clusters", fontsize=8)
        panel.tick_params(labelsize=7)
    panels[0].legend(fontsize=7, loc="center left")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
