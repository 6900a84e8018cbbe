"""The features of the teachers, made once: of the photographs to train on and of those asked."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.keys import HELD_OUT_FRACTION, held_out, split_positions
from mlcd.types import Embeddings, unit_rows
from studies.losses.data import make
from studies.losses.references import resnet_model
from studies.losses.tiers import MOBILENET

TEACHERS: Final = ("mobilenet", "hog", "resnet20")
ASKED: Final = ("tiny_imagenet_30", "cifar10_jpg", "caltech101_20", "fashion_products")
HELD_OUT: Final = "held_out"
PRETRAINING: Final = "tiny_imagenet_pretrain"
_SHARDS: Final = f"{PRETRAINING}/pretrain-*.tar"


@dataclass(frozen=True)
class Asked:
    """A set whose every image is asked: unit rows [N, D], less the training rows' mean, and
    classes [N].
    """

    name: str
    rows: Embeddings
    classes: NDArray[np.int64]


@dataclass(frozen=True)
class Teacher:
    """The features of one teacher: unit rows [N, D] to train on, less their mean, and the sets."""

    name: str
    training: Embeddings
    asked: tuple[Asked, ...]


@dataclass(frozen=True)
class Features:
    """The directories: data has the shared sets, state everything that the study makes."""

    data: Path
    state: Path

    def prepare(self) -> None:
        """Embeds all sets by all teachers, where that is not done."""
        for teacher in TEACHERS:
            for name in (PRETRAINING, *ASKED):
                location = self.data / (_SHARDS if name == PRETRAINING else name)
                out = self._artifact(teacher, name)
                out.parent.mkdir(parents=True, exist_ok=True)
                make(out, "embed", location, out, "--model", self._model(teacher))

    def open(self, teacher: str) -> Teacher:
        """Opens what `prepare` made."""
        stored = EmbeddingsArtifact.open(self._artifact(teacher, PRETRAINING))
        rows, names = stored.load(), stored.class_names
        tested = held_out(split_positions(stored.keys, names), HELD_OUT_FRACTION)
        mean = rows[~tested].mean(axis=0)
        classes = _numbers(names)
        asked = [Asked(HELD_OUT, unit_rows(rows[tested] - mean), classes[tested])]
        asked += self._asked(teacher, mean)
        return Teacher(teacher, unit_rows(rows[~tested] - mean), tuple(asked))

    def _asked(self, teacher: str, mean: NDArray[np.float32]) -> Iterator[Asked]:
        for name in ASKED:
            stored = EmbeddingsArtifact.open(self._artifact(teacher, name))
            classes = _classes(self.data / name, stored)
            yield Asked(name, unit_rows(stored.load() - mean), _numbers(classes))

    def _artifact(self, teacher: str, name: str) -> Path:
        return self.state / "features" / teacher / name

    def _model(self, teacher: str) -> str:
        if teacher == "resnet20":
            return str(resnet_model(self.data, self.state))
        return teacher if teacher == "hog" else str(self.data / MOBILENET)


def _classes(folder: Path, stored: EmbeddingsArtifact) -> list[str]:
    """Returns the class of each row: by labels.csv, where the set has it, else by sub-folder."""
    table = folder / "labels.csv"
    if not table.is_file():
        return [str(name) for name in stored.class_names]
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    column = "label" if "label" in lines[0] else "articleType"
    by_key = {line["path"]: line[column] for line in lines}
    return [by_key[key] for key in stored.keys]


def _numbers(names: list[str] | list[str | None]) -> NDArray[np.int64]:
    return np.unique(np.array(names, dtype=str), return_inverse=True)[1].astype(np.int64)
