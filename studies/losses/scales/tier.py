"""The scales tier as slices of runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from studies.losses.frozen.features import PRETRAINING, Features, opened_teacher
from studies.losses.frozen.run import perform_arm
from studies.losses.frozen.tier import FROZEN
from studies.losses.instrument.asked import ASKED
from studies.losses.instrument.rows import Outcome
from studies.losses.scales.arms import SCALES_TEACHER, LearnedArm, ScalesRun, all_scales_runs
from studies.losses.scales.pairs import opened_pairs, perform_pairs

SCALES: Final = "scales"


@dataclass(frozen=True)
class ScalesTier:
    """Learned scalars over fixed features, and losses of pairs. The features are the frozen
    tier's.
    """

    features: Features
    state: Path
    name: ClassVar[str] = SCALES
    resumes: ClassVar[bool] = False
    jobs: ClassVar[int] = 0

    @classmethod
    def of(cls, data: Path, out: Path) -> "ScalesTier":
        return cls(Features(data, out / FROZEN), out / SCALES)

    @property
    def data(self) -> Path:
        return self.features.data

    @property
    def required(self) -> Sequence[str]:
        return (PRETRAINING, *ASKED, "encoders")

    def all_runs(self) -> Iterator[ScalesRun]:
        return all_scales_runs()

    def prepare(self) -> None:
        self.features.prepare((SCALES_TEACHER,))
        opened_pairs(self.features, self.state)

    def perform(self, run: ScalesRun) -> Outcome:
        if isinstance(run.arm, LearnedArm):
            teacher = opened_teacher(self.features, SCALES_TEACHER)
            return perform_arm(run.arm, run.seed, teacher, self.features.state)
        return perform_pairs(run.arm, run.seed, opened_pairs(self.features, self.state))
