"""The towers tier as slices of runs, and the same with larger towers on a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, get_args

from mlcd.training.head.loss_config import LossKind
from studies.losses.frozen.features import PRETRAINING, Features
from studies.losses.frozen.tier import FROZEN
from studies.losses.instrument.asked import ASKED
from studies.losses.instrument.rows import Outcome
from studies.losses.towers.arms import ON_CPU, ON_GPU, TowerRun, all_tower_runs
from studies.losses.towers.run import Towers, perform_tower, prepare_towers

TOWERS: Final = "towers"
GPU: Final = "gpu"


@dataclass(frozen=True)
class TowersTier:
    """Losses of towers that are trained from pixels. The features are the frozen tier's."""

    towers: Towers
    name: ClassVar[str] = TOWERS
    resumes: ClassVar[bool] = True
    jobs: ClassVar[int] = 0

    @classmethod
    def of(cls, data: Path, out: Path) -> "TowersTier":
        return cls(Towers(Features(data, out / FROZEN), out / TOWERS, ON_CPU))

    @property
    def data(self) -> Path:
        return self.towers.features.data

    @property
    def state(self) -> Path:
        return self.towers.state

    @property
    def required(self) -> Sequence[str]:
        return (PRETRAINING, *ASKED, "encoders")

    def all_runs(self) -> Iterator[TowerRun]:
        return all_tower_runs(self.towers.size)

    def prepare(self) -> None:
        prepare_towers(self.towers)

    def perform(self, run: TowerRun) -> Outcome:
        return perform_tower(run, self.towers)


@dataclass(frozen=True)
class GpuTier(TowersTier):
    """The runs that can be trained, with ViT-S/8 and 30 seeds, one at a time on a GPU. It was never
    run.
    """

    name: ClassVar[str] = GPU
    jobs: ClassVar[int] = 1

    @classmethod
    def of(cls, data: Path, out: Path) -> "GpuTier":
        return cls(Towers(Features(data, out / FROZEN), out / GPU, ON_GPU))

    def all_runs(self) -> Iterator[TowerRun]:
        return (run for run in super().all_runs() if run.arm.kind in get_args(LossKind))
