"""The mosaics tier as slices of runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from studies.losses.frozen.features import PRETRAINING, Features, opened_teacher
from studies.losses.frozen.tier import FROZEN
from studies.losses.instrument.asked import ASKED
from studies.losses.instrument.rows import Outcome
from studies.losses.mosaics.arms import MosaicRun, all_mosaic_runs
from studies.losses.mosaics.run import perform_mosaic
from studies.losses.mosaics.tags import COCO, tagged_sets
from studies.losses.mosaics.tiles import Mosaics, opened_mosaics

MOSAICS: Final = "mosaics"


@dataclass(frozen=True)
class MosaicsTier:
    """Losses over the features of mosaics. The features of photographs are the frozen tier's."""

    mosaics: Mosaics
    name: ClassVar[str] = MOSAICS
    resumes: ClassVar[bool] = False
    jobs: ClassVar[int] = 0

    @classmethod
    def of(cls, data: Path, out: Path) -> "MosaicsTier":
        return cls(Mosaics(Features(data, out / FROZEN), out / MOSAICS))

    @property
    def data(self) -> Path:
        return self.mosaics.features.data

    @property
    def state(self) -> Path:
        return self.mosaics.state

    @property
    def required(self) -> Sequence[str]:
        return (PRETRAINING, *ASKED, COCO, "encoders")

    def all_runs(self) -> Iterator[MosaicRun]:
        return all_mosaic_runs()

    def prepare(self) -> None:
        # Another teacher's features are made when its first run needs them.
        self.mosaics.features.prepare(("mobilenet",))

    def perform(self, run: MosaicRun) -> Outcome:
        features = self.mosaics.features
        features.prepare((run.teacher,))
        singles = opened_teacher(features, run.teacher).asked
        teacher = opened_mosaics(self.mosaics, run.teacher, run.objects)
        return perform_mosaic(run, teacher, singles, tagged_sets(features, run.teacher), self.state)
