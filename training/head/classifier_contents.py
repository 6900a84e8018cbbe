"""The contents of a checkpoint of a tower with its classifier."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.examples import EXAMPLES, Examples
from mlcd.artifacts.manifest import Request
from mlcd.training.checkpoint.files import STATE
from mlcd.training.head.snapshot import (
    Snapshot,
    read_servable,
    read_unit_centers,
    restore,
    take_snapshot,
)
from mlcd.training.head.state import TrainState
from mlcd.training.start import CLASSES
from mlcd.types import Fingerprint


@dataclass(frozen=True)
class ClassifierContents:
    """Writes and restores the tower and the unit centers of the classes.

    run: directory with the classes' examples. names: class names. sizes: number of samples by first
    label. classes: digest of the labels' classes; a later run keeps the head if its labels have the
    same digest.
    """

    run: Path
    names: Sequence[str | None] | None
    sizes: NDArray[np.int64]
    classes: str | None

    def copy(self, state: TrainState) -> Snapshot:
        return take_snapshot(state)

    def restore(self, state: TrainState, directory: Path, step: int, group: Any) -> None:
        restore(state, directory, step, group)

    def write(self, copy: Snapshot, directory: Path) -> Fingerprint:
        """Writes the tower and the centers."""
        model = read_servable(copy, directory / STATE)
        fingerprint = model.fingerprint()
        weights = directory / "weights"
        weights.mkdir()
        model.write(weights)
        self._write_centers(copy, directory, fingerprint)
        return fingerprint

    def _write_centers(self, copy: Snapshot, directory: Path, fingerprint: Fingerprint) -> None:
        config = {"origin": "training", "step": copy.step, CLASSES: self.classes}
        request = Request("centers", config, (), fingerprint)
        examples = self.run / EXAMPLES
        with Draft(directory / "centers", request, fresh=True) as draft:
            Centers(
                vectors=read_unit_centers(directory / STATE),
                sizes=self.sizes,
                fingerprint=fingerprint,
                names=None if self.names is None else tuple(self.names),
                examples=Examples.open(examples) if examples.is_file() else None,
            ).write(draft)
            draft.publish()
