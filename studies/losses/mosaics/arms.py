"""The runs of the mosaics tier."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from studies.losses.frozen.arms import Arm
from studies.losses.mosaics.tiles import OBJECTS

MOSAIC_TEACHERS: Final = ("mobilenet", "hog")
MOSAIC_SEEDS: Final = tuple(range(1, 13))
# With one label Eq. 4 is Eq. 3, so MLC has no arm of one label.
MOSAIC_ARMS: Final = {
    "CD": Arm("cd", labels=1),
    "MLCD(1)": Arm(labels=1),
    "MLC(4)": Arm("mlc", labels=4),
    "MLCD(4)": Arm(labels=4),
    "MLC": Arm("mlc"),
    "MLCD": Arm(),
}
_CLUSTERS: Final = (250, 2000)  # besides the arms' own, to tell purity from the number of objects


@dataclass(frozen=True)
class MosaicRun:
    """One run, fully described by its name."""

    teacher: str
    objects: int
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.teacher}/objects{self.objects}/{self.arm.name}/seed{self.seed}"

    @property
    def fields(self) -> dict[str, Any]:
        arm = {"arm": self.arm.name, "seed": self.seed, **asdict(self.arm)}
        return {"teacher": self.teacher, "objects": self.objects, **arm}


def all_mosaic_runs() -> Iterator[MosaicRun]:
    """Yields every run, seed by seed: the arms, then CD and MLCD at other numbers of clusters."""
    swept = [
        replace(MOSAIC_ARMS[name], clusters=clusters)
        for clusters in _CLUSTERS
        for name in ("CD", "MLCD")
    ]
    for teacher in MOSAIC_TEACHERS:
        for arms in (list(MOSAIC_ARMS.values()), swept):
            for seed in MOSAIC_SEEDS:
                for objects in OBJECTS:
                    yield from (MosaicRun(teacher, objects, arm, seed) for arm in arms)
