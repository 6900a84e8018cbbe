"""The picture on the front page, from a finished demo.

    python docs/pictures.py demo docs/assets/centers.png

Each row: one learned class, its name by majority, and the images whose embeddings are nearest to its center.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.embeddings import EmbeddingsArtifact

_ROWS, _COLUMNS, _SIDE, _GAP, _NAME = 8, 12, 56, 6, 64


def main(demo: Path, out: Path) -> None:
    centers = Centers.open(demo / "model" / "centers")
    embeddings = EmbeddingsArtifact.open(demo / "embeddings")
    # The largest classes, one for each name, so that the picture shows different things.
    by_size = sorted(range(len(centers.vectors)), key=lambda center: -centers.sizes[center])
    first_of_name = {centers.name(center): center for center in reversed(by_size)}
    shown = sorted(first_of_name.items(), key=lambda item: str(item[0]))[:_ROWS]
    similarities = centers.vectors @ embeddings.load().T
    canvas = Image.new(
        "RGB", (_NAME + _COLUMNS * (_SIDE + _GAP), len(shown) * (_SIDE + _GAP)), "white"
    )
    draw = ImageDraw.Draw(canvas)
    for row, (name, center) in enumerate(shown):
        top = row * (_SIDE + _GAP)
        draw.text(
            (_GAP, top + _SIDE // 2),
            f"“{name}” #{center}",
            fill="black",
            anchor="lm",
            font=ImageFont.load_default(13),
        )
        for column, item in enumerate(np.argsort(-similarities[center])[:_COLUMNS]):
            picture = Image.open(demo / "images" / embeddings.keys[item]).convert("RGB")
            canvas.paste(picture.resize((_SIDE, _SIDE)), (_NAME + column * (_SIDE + _GAP), top))
    out.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(out, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
