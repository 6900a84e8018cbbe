"""The features of the teachers, made once: of the photographs to train on and of those asked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.keys import HELD_OUT_FRACTION, mask_held_out, split_positions
from mlcd.types import Embeddings, unit_rows
from studies.losses.data import make
from studies.losses.instrument.asked import ASKED, HELD_OUT, Asked
from studies.losses.instrument.photographs import classes_of, numbered
from studies.losses.references import resnet_model
from studies.losses.tiers import MOBILENET

TEACHERS: Final = ("mobilenet", "hog", "resnet20")
PRETRAINING: Final = "tiny_imagenet_pretrain"
SHARDS: Final = f"{PRETRAINING}/pretrain-*.tar"


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

    def prepare(self, teachers: Sequence[str] = TEACHERS) -> None:
        """Embeds all sets by the teachers, where that is not done."""
        for teacher in teachers:
            for name in (PRETRAINING, *ASKED):
                self.embed(teacher, name)

    def embed(self, teacher: str, name: str) -> EmbeddingsArtifact:
        """Returns the embeddings of a set, made where they are missing."""
        location = self.data / (SHARDS if name == PRETRAINING else name)
        out = self._artifact(teacher, name)
        out.parent.mkdir(parents=True, exist_ok=True)
        make(out, "embed", location, out, "--model", self.model(teacher))
        return EmbeddingsArtifact.open(out)

    def open(self, teacher: str) -> Teacher:
        """Opens what `prepare` made."""
        stored = EmbeddingsArtifact.open(self._artifact(teacher, PRETRAINING))
        rows, names = stored.load(), stored.class_names
        tested = mask_held_out(split_positions(stored.keys, names), HELD_OUT_FRACTION)
        mean = rows[~tested].mean(axis=0)
        classes = numbered(names)
        asked = [Asked(HELD_OUT, unit_rows(rows[tested] - mean), classes[tested])]
        asked += self._asked(teacher, mean)
        return Teacher(teacher, unit_rows(rows[~tested] - mean), tuple(asked))

    def _asked(self, teacher: str, mean: NDArray[np.float32]) -> Iterator[Asked]:
        for name in ASKED:
            stored = EmbeddingsArtifact.open(self._artifact(teacher, name))
            classes = classes_of(self.data / name, stored.keys, stored.class_names)
            yield Asked(name, unit_rows(stored.load() - mean), classes)

    def _artifact(self, teacher: str, name: str) -> Path:
        return self.state / "features" / teacher / name

    def model(self, teacher: str) -> str:
        if teacher == "resnet20":
            return str(resnet_model(self.data, self.state))
        return teacher if teacher == "hog" else str(self.data / MOBILENET)


@lru_cache(maxsize=1)  # one teacher is in memory at a time
def opened_teacher(features: Features, teacher: str) -> Teacher:
    """Opens a teacher once in each process."""
    return features.open(teacher)
