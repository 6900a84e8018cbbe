"""Draws the curve of a run's loss with Pillow, which spares a plotting library."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from mlcd.artifacts.disk import write_synced
from mlcd.training.telemetry.step_logs import read_losses

LOSS_PICTURE: Final = "loss.png"
_WIDTH: Final = 640  # pixels of the curve
_HEIGHT: Final = 320
_MARGIN: Final = 64
_INK: Final = "#1f2933"
_LINE: Final = "#3b7ea1"


def write_losses(run: Path) -> None:
    """Draws the losses of metrics.jsonl into the run's loss.png, if there are at least two."""
    losses = read_losses(run)
    if len(losses) < 2:
        return
    picture = io.BytesIO()
    draw_losses([(record["step"], record["loss"]) for record in losses]).save(picture, "PNG")
    write_synced(run / LOSS_PICTURE, picture.getvalue())


def draw_losses(points: Sequence[tuple[int, float]]) -> Image.Image:
    """Draws (step, loss) as a line; the axes are labeled with the smallest and largest values."""
    steps, losses = zip(*points, strict=True)
    first, last = steps[0], steps[-1]
    lowest, highest = min(losses), max(losses)
    right, floor = _MARGIN + _WIDTH, _MARGIN + _HEIGHT

    def place(step: int, loss: float) -> tuple[float, float]:
        across = (step - first) / max(1, last - first)
        up = (loss - lowest) / ((highest - lowest) or 1.0)
        return _MARGIN + _WIDTH * across, floor - _HEIGHT * up

    image = Image.new("RGB", (right + _MARGIN, floor + _MARGIN), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(14)
    draw.line([place(*point) for point in points], fill=_LINE, width=2)
    draw.line((_MARGIN, _MARGIN, _MARGIN, floor, right, floor), fill=_INK)
    draw.text((_MARGIN, _MARGIN / 2), f"loss, {losses[-1]:.4g} at step {last}", _INK, font, "lm")
    for loss in {lowest, highest}:
        draw.text((_MARGIN - 6, place(first, loss)[1]), f"{loss:.4g}", _INK, font, "rm")
    for step in (first, last):
        draw.text((place(step, lowest)[0], floor + 6), str(step), _INK, font, "mt")
    return image
