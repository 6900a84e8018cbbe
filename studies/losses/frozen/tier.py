"""The frozen tier as slices of runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from studies.losses.frozen.arms import FeaturesRun, FrozenRun, all_runs
from studies.losses.frozen.features import PRETRAINING, Features, opened_teacher
from studies.losses.frozen.run import perform
from studies.losses.instrument.asked import ASKED
from studies.losses.instrument.rows import Outcome

FROZEN: Final = "frozen"


@dataclass(frozen=True)
class FrozenTier:
    """Losses over the features of three teachers."""

    features: Features
    name: ClassVar[str] = FROZEN
    resumes: ClassVar[bool] = False
    jobs: ClassVar[int] = 0

    @classmethod
    def of(cls, data: Path, out: Path) -> "FrozenTier":
        return cls(Features(data, out / FROZEN))

    @property
    def data(self) -> Path:
        return self.features.data

    @property
    def state(self) -> Path:
        return self.features.state

    @property
    def required(self) -> Sequence[str]:
        return (PRETRAINING, *ASKED, "encoders")

    def all_runs(self) -> Iterator[FrozenRun | FeaturesRun]:
        return all_runs()

    def prepare(self) -> None:
        self.features.prepare()

    def perform(self, run: FrozenRun | FeaturesRun) -> Outcome:
        return perform(run, opened_teacher(self.features, run.teacher), self.state)
