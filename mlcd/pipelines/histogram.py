"""A bar chart of cluster sizes, drawn by Pillow: one picture needs no plotting library."""

from collections.abc import Sequence
from typing import Final

from PIL import Image, ImageDraw, ImageFont

_WIDTH: Final = 64  # pixels of a bar and its gap
_BAR: Final = 48
_HEIGHT: Final = 240  # pixels of the tallest bar
_MARGIN: Final = 48
_INK: Final = "#1f2933"
_FILL: Final = "#3b7ea1"


def draw_histogram(bins: Sequence[tuple[int, int]], title: str) -> Image.Image:
    """Draws one bar for each (smallest value of the bin, count), labeled with both."""
    image = Image.new(
        "RGB", (2 * _MARGIN + _WIDTH * max(len(bins), 4), _HEIGHT + 2 * _MARGIN), "white"
    )
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default()
    draw.text((_MARGIN, _MARGIN // 4), title, fill=_INK, font=font)
    floor = _MARGIN + _HEIGHT
    tallest = max((count for _, count in bins), default=1) or 1
    for index, (smallest, count) in enumerate(bins):
        left = _MARGIN + index * _WIDTH
        top = floor - round(_HEIGHT * count / tallest)
        draw.rectangle((left, top, left + _BAR, floor), fill=_FILL)
        draw.text((left + _BAR / 2, top - 2), str(count), fill=_INK, font=font, anchor="mb")
        following = bins[index + 1][0] if index + 1 < len(bins) else 2 * smallest
        label = str(smallest) if following - smallest <= 1 else f"{smallest}-{following - 1}"
        draw.text((left + _BAR / 2, floor + 6), label, fill=_INK, font=font, anchor="mt")
    draw.line((_MARGIN, floor, image.width - _MARGIN, floor), fill=_INK)
    return image
