"""The picture: accuracy over the positive cosine at which each loss comes to rest.

The same rows give the same bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from studies.losses.statistics import interval
from studies.losses.verdict.evidence import UNSEEN, Row, mean_of, where
from studies.losses.verdict.resting import FORMS, resting_arms

mpl.use("agg")

_FIXED: Final[dict[Any, Any]] = {
    "svg.hashsalt": "mlcd",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
}
_COLORS: Final = dict(
    zip(FORMS, ("#1f5f99", "#b3541e", "#3d7a3d", "#7a3d7a", "#8a7a1e"), strict=True)
)
_MARKS: Final = {4.0: "v", 8.0: "s", 16.0: "o", 32.0: "D", 64.0: "^"}  # by scale
_TITLES: Final = {"mlcd": "MLCD (Eq. 5)", "mlc": "MLC (Eq. 4)", "cd": "CD (Eq. 3)"}


def draw_resting(by_teacher: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draws a panel for each teacher that has rows; an empty one where none has."""
    shown: dict[str, Sequence[Row]]
    shown = {teacher: rows for teacher, rows in by_teacher.items() if rows} or {"nothing yet": []}
    with _panels(path, len(shown)) as panels:
        for panel, (teacher, rows) in zip(panels, shown.items(), strict=True):
            _draw_teacher(panel, rows)
            panel.set_title(f"clusters of {teacher}", fontsize=9)
        panels[0].set_ylabel("unseen classes, 5-NN, %", fontsize=8)
        if panels[0].get_legend_handles_labels()[0]:
            panels[0].legend(fontsize=6)


def _draw_teacher(panel: Axes, rows: Sequence[Row]) -> None:
    arms, named = resting_arms(), set()
    for name, arm in sorted(arms.items()):
        own = where(rows, arm=name)
        # One label is that of CD alone; the number of labels has a table.
        if not own or (arm.labels != 8 and arm.kind != "cd"):
            continue
        values = [100 * mean_of([row], UNSEEN) for row in own]
        label = None if arm.kind in named else _TITLES.get(arm.kind, arm.kind)
        named.add(arm.kind)
        panel.errorbar(
            mean_of(own, "positive_cosine"),
            float(np.mean(values)),
            yerr=interval(values).half_width,
            fmt=_MARKS[arm.scale],
            markersize=4,
            color=_COLORS[arm.kind],
            elinewidth=0.8,
            label=label,
        )
        text = f"s {arm.scale:g}" if not arm.bias else f"s {arm.scale:g}, b {arm.bias:+g}"
        panel.annotate(
            text,
            (mean_of(own, "positive_cosine"), float(np.mean(values))),
            fontsize=5,
            xytext=(3, 3),
            textcoords="offset points",
        )
    panel.set_xlabel("mean cosine of positives at the end", fontsize=8)


@contextmanager
def _panels(path: Path, num: int) -> Iterator[Sequence[Axes]]:
    """Gives so many panels side by side, and writes them once they are drawn."""
    with mpl.rc_context(_FIXED):
        figure, panels = plt.subplots(1, num, figsize=(max(5.5, 3.6 * num), 3.8), squeeze=False)
        try:
            yield panels[0]
            for panel in panels[0]:
                panel.tick_params(labelsize=7)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.tight_layout()
            figure.savefig(path, metadata={"Date": None, "Creator": None})
        finally:
            plt.close(figure)
