"""A picture of panels as an SVG file: the same rows give the same bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

mpl.use("agg")

_FIXED: Final[dict[Any, Any]] = {
    "svg.hashsalt": "mlcd",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
}


@contextmanager
def panels_of(path: Path, num: int) -> Iterator[Sequence[Axes]]:
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


def explain(panel: Axes) -> None:
    """Adds a legend to a panel that shows anything."""
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=6)
