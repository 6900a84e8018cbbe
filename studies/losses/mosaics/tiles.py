"""Mosaics: which photographs are in each picture, its pixels, and a teacher's features of it.

Shapes: N pictures, M objects of a picture, C classes, D features, S pixels of a tile's side.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mlcd.artifacts.disk import hold_lock
from mlcd.encoders import open_encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.keys import mask_held_out, split_positions
from mlcd.types import Embeddings, unit_rows
from studies.losses.frozen.features import PRETRAINING, SHARDS, Features
from studies.losses.instrument.asked import AskedTags
from studies.losses.instrument.photographs import Photographs, classes_of, numbered

OBJECTS: Final = (1, 2, 4)
UNSEEN: Final = "tiny_imagenet_30"
_NUM_TRAINING: Final = 8000  # photographs, and pictures of each number of objects
_NUM_ASKED: Final = 2000  # pictures of unseen classes, of each number of objects
_BATCH: Final = 64
# The object in each of the four tiles, row by row.
_LAYOUTS: Final = {1: (0, 0, 0, 0), 2: (0, 1, 1, 0), 4: (0, 1, 2, 3)}


@dataclass(frozen=True)
class MosaicTeacher:
    """A teacher's features of mosaics of one number of objects.

    training: unit rows [N, D], less their mean. tags: bool [N, C], the classes of their objects.
    asked: for each number of objects, pictures of unseen classes, less the mean of the training
    pictures of as many objects.
    """

    name: str
    training: Embeddings
    tags: NDArray[np.bool_]
    asked: tuple[AskedTags, ...]


@dataclass(frozen=True)
class Tiles:
    """Photographs that mosaics are made of: pixels uint8 [N, 3, S, S] and classes [N]."""

    pixels: NDArray[np.uint8]
    classes: NDArray[np.int64]


@dataclass(frozen=True)
class Mosaics:
    """The mosaics of both sets. features: those of single photographs. state: of the mosaics."""

    features: Features
    state: Path

    def tiles(self, name: str) -> Tiles:
        """Opens the photographs of a set; of the pre-training set those that are trained on."""
        data = self.features.data
        location = str(data / (SHARDS if name == PRETRAINING else name))
        found = Photographs.open(location, self.state / "photographs" / f"{name}.npy")
        if name != PRETRAINING:
            return Tiles(found.pixels, classes_of(data / name, found.keys, found.class_names))
        trained = ~mask_held_out(split_positions(found.keys, found.class_names))
        drawn = np.random.default_rng(0).permutation(np.flatnonzero(trained))[:_NUM_TRAINING]
        return Tiles(found.pixels[drawn], numbered(found.class_names)[drawn])

    def open(self, teacher: str, objects: int) -> MosaicTeacher:
        """Opens the features, which are made where they are missing."""
        unseen = self.tiles(UNSEEN).classes
        asked = []
        for number in OBJECTS:
            mean = self._rows(teacher, PRETRAINING, number).mean(axis=0)
            rows = unit_rows(self._rows(teacher, UNSEEN, number) - mean)
            asked.append(AskedTags(f"tiles_{number}", rows, _tags(unseen, number, _NUM_ASKED)))
        rows = self._rows(teacher, PRETRAINING, objects)
        tags = _tags(self.tiles(PRETRAINING).classes, objects, _NUM_TRAINING)
        return MosaicTeacher(teacher, unit_rows(rows - rows.mean(axis=0)), tags, tuple(asked))

    def _rows(self, teacher: str, name: str, objects: int) -> NDArray[np.float32]:
        path = self.state / "features" / teacher / f"{name}-{objects}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(path.with_suffix(".lock")):
            if not path.is_file():
                tiles = self.tiles(name)
                num = _NUM_TRAINING if name == PRETRAINING else _NUM_ASKED
                chosen = compose(tiles.classes, objects, num)
                rows = np.concatenate(list(self._encoded(teacher, tiles, chosen)))
                written = path.with_suffix(".partial.npy")
                np.save(written, rows, allow_pickle=False)
                written.rename(path)
        found: NDArray[np.float32] = np.load(path, allow_pickle=False)
        return found

    def _encoded(
        self, teacher: str, tiles: Tiles, chosen: NDArray[np.int64]
    ) -> Iterator[NDArray[np.float32]]:
        encoder = open_encoder(self.features.model(teacher), EncoderOptions(num_threads=1))
        try:
            for start in range(0, len(chosen), _BATCH):
                pictures = map(
                    picture, (tiles.pixels[row] for row in chosen[start : start + _BATCH])
                )
                yield encoder.encode(
                    np.stack([encoder.preprocess.apply(each) for each in pictures])
                )
        finally:
            encoder.close()


def compose(classes: NDArray[np.int64], objects: int, num: int) -> NDArray[np.int64]:
    """Draws the photographs of each picture, [num, M], of M different classes.

    Every photograph is dealt once before one is dealt again, but for those whose class the picture
    had already.
    """
    rng = np.random.default_rng(objects)
    chosen = np.empty((num, objects), np.int64)
    for column in range(objects):
        decks = -(-num // len(classes))
        dealt = np.concatenate([rng.permutation(len(classes)) for _ in range(decks)])[:num]
        before = classes[chosen[:, :column]]
        while (again := (classes[dealt][:, None] == before).any(axis=1)).any():
            dealt[again] = rng.integers(0, len(classes), int(again.sum()))
        chosen[:, column] = dealt
    return chosen


def picture(photographs: NDArray[np.uint8]) -> Image.Image:
    """Returns the mosaic of photographs, uint8 [M, 3, S, S]."""
    first, second, third, fourth = (photographs[tile] for tile in _LAYOUTS[len(photographs)])
    rows = [np.concatenate(pair, axis=2) for pair in ((first, second), (third, fourth))]
    whole = np.concatenate(rows, axis=1)
    return Image.fromarray(np.ascontiguousarray(whole.transpose(1, 2, 0)))


def _tags(classes: NDArray[np.int64], objects: int, num: int) -> NDArray[np.bool_]:
    tags = np.zeros((num, int(classes.max()) + 1), np.bool_)
    tags[np.arange(num)[:, None], classes[compose(classes, objects, num)]] = True
    return tags


@lru_cache(maxsize=len(OBJECTS))
def opened_mosaics(mosaics: Mosaics, teacher: str, objects: int) -> MosaicTeacher:
    """Opens the features once in each process."""
    return mosaics.open(teacher, objects)
