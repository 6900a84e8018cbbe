"""The rows that evaluators measure, with keys and classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.types import SampleKey
from training.evaluation.splits import Split, split_samples, with_validation


@dataclass(frozen=True)
class LabeledRows:
    """Rows of known class, the same in every process.

    rows: float32 [N, D], finite. keys, splits (see mlcd.keys) and class_names: N. given: the split
    that the samples come with, if any. sha256: uint8 [N, 32] of the images.
    """

    rows: NDArray[np.float32]
    keys: Sequence[SampleKey]
    splits: NDArray[np.float64]
    class_names: Sequence[str]
    given: Split | None = None
    sha256: NDArray[np.uint8] | None = None

    def split(self, hold_out: float) -> Split:
        """Returns the given split, or else `hold_out` of each class to test on and a fifth of the
        rest.
        """
        return (
            split_samples(self.splits, hold_out)
            if self.given is None
            else with_validation(self.given, self.splits)
        )

    @cached_property
    def classes(self) -> NDArray[np.int64]:
        """Returns int64 [N]: the index of each sample's class among the sorted names."""
        _, classes = np.unique(np.asarray(self.class_names), return_inverse=True)
        return classes.astype(np.int64)

    def __post_init__(self) -> None:
        finite = np.isfinite(self.rows.sum(axis=1, dtype=np.float64))
        if not finite.all():
            raise InvalidInput(
                f"the features of {self.keys[int(np.flatnonzero(~finite)[0])]} hold NaN or Inf "
                f"({int((~finite).sum())} of {len(finite)} images)",
                remedy="has the model diverged?",
            )
