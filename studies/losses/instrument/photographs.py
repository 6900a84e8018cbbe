"""The photographs of a set as pixels, decoded once and mapped into memory, with keys and classes.

Shapes: N images, S pixels of a side.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.disk import hold_lock
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec

SIDE: Final = 64


@dataclass(frozen=True)
class Photographs:
    """All images of a set: pixels uint8 [N, 3, S, S]. class_names: None where none is known."""

    keys: tuple[str, ...]
    class_names: tuple[str | None, ...]
    pixels: NDArray[np.uint8]

    @classmethod
    def open(cls, location: str, path: Path, side: int = SIDE) -> "Photographs":
        """Opens the photographs of a source; decodes them first where that is not done.

        path: of the pixels, with `.npy`; the keys are beside them. side: S.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        listed = path.with_suffix(".json")
        with hold_lock(path.with_suffix(".lock")):
            if not path.is_file():
                _decode(location, path, listed, side)
        keys, names = json.loads(listed.read_text())
        return cls(tuple(keys), tuple(names), np.load(path, mmap_mode="r", allow_pickle=False))


def _decode(location: str, path: Path, listed: Path, side: int) -> None:
    source = open_source(location)
    entries = list(source.entries)
    spec = PreprocessSpec(resize_shortest=side, crop=side)
    pixels = np.stack([spec.prepare(source.read(entry)) for entry in entries])
    listed.write_text(
        json.dumps([[entry.key for entry in entries], [entry.class_name for entry in entries]])
    )
    written = path.with_suffix(".partial.npy")
    np.save(written, pixels, allow_pickle=False)
    written.rename(path)


def classes_of(
    folder: Path,
    keys: Sequence[str],
    class_names: Sequence[str | None],
    column: str = "articleType",
) -> NDArray[np.int64]:
    """Returns the class of each image, [N], numbered by name.

    It is that of labels.csv, where the set has it, else the sub-folder. column: of labels.csv,
    where that has no column `label`.
    """
    names: Sequence[str | None] = class_names
    if (table := folder / "labels.csv").is_file():
        with table.open(newline="") as file:
            lines = list(csv.DictReader(file))
        wanted = "label" if "label" in lines[0] else column
        by_key = {line["path"]: line[wanted] for line in lines}
        names = [by_key[key] for key in keys]
    return numbered(names)


def numbered(names: Sequence[str | None]) -> NDArray[np.int64]:
    """Returns the place of each name among all of them, sorted."""
    return np.unique(np.array(names, dtype=str), return_inverse=True)[1].astype(np.int64)
