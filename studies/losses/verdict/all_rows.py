"""The rows of every quick tier, and the named differences that they are asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from studies.losses.frozen.arms import FROM_CENTERS, NAMED, WIDE
from studies.losses.frozen.features import TEACHERS
from studies.losses.frozen.tier import FROZEN
from studies.losses.instrument.rows import read_rows, table_of
from studies.losses.mosaics.tier import MOSAICS
from studies.losses.scales.tier import SCALES
from studies.losses.towers.arms import (
    BIASED,
    CHANGED_ARMS,
    INSTANCE_ARMS,
    NO_TEACHER,
    SAME_VIEWS,
    SCALED,
    SCALED_ARMS,
    SCALED_TEACHERS,
    TOWER_ARMS,
    TOWER_TEACHERS,
)
from studies.losses.towers.tier import GPU, TOWERS
from studies.losses.verdict.contrasts import (
    Contrast,
)
from studies.losses.verdict.evidence import (
    Row,
    where,
)

FROZEN_CONTRASTS: Final = tuple(
    Contrast(f"{arm} - {other}", NAMED[arm].name, NAMED[other].name)
    for arm, other in (
        ("MLCD", "MLC"), ("MLCD", "CD"), ("MLCD(b = +4)", "MLCD"), ("per_column", "MLCD"),
        ("learned s and b", "MLCD"),
    )
)  # fmt: skip
START_CONTRAST: Final = Contrast("centers - random", FROM_CENTERS.name, WIDE.name)
_ALL_TOWER_ARMS: Final = {**TOWER_ARMS, **SCALED_ARMS, **CHANGED_ARMS, **INSTANCE_ARMS}
TOWER_CONTRASTS: Final = tuple(
    Contrast(f"{arm} - {other}", _ALL_TOWER_ARMS[arm].name, _ALL_TOWER_ARMS[other].name)
    for arm, other in (
        ("MLCD", "MLC"), ("MLCD", "CD"), (BIASED, "MLCD"), ("per_column", "MLCD"),
        (SCALED, "MLCD"), (SAME_VIEWS, "MLCD"), ("MLCD", "softmax of instances"),
        ("MLCD", "sigmoid of instances"), (SAME_VIEWS, "softmax of instances"),
    )
)  # fmt: skip
# Arms that are not run with every teacher, and the teachers with which they are.
_OF_SOME: Final = {arm.name: SCALED_TEACHERS for arm in SCALED_ARMS.values()} | {
    arm.name: ("mobilenet",) for arm in CHANGED_ARMS.values()
}
TITLES: Final = {
    "mobilenet": "MobileNetV2",
    "hog": "HOG",
    "resnet20": "ResNet-20",
    "own": "its own first round",
}


@dataclass(frozen=True)
class AllRows:
    """The rows of every quick tier."""

    frozen: Sequence[Row]
    towers: Sequence[Row]
    mosaics: Sequence[Row]
    scales: Sequence[Row]
    gpu: Sequence[Row]

    @classmethod
    def read(cls, results: Path) -> "AllRows":
        names = (FROZEN, TOWERS, MOSAICS, SCALES, GPU)
        return cls(*(read_rows(table_of(name, results)) for name in names))

    @property
    def sources(self) -> Iterator[tuple[str, Sequence[Row], Sequence[Contrast]]]:
        """Yields what is compared: its title, the rows of one teacher, and the contrasts."""
        for teacher in TEACHERS:
            title = f"frozen, {TITLES[teacher]}"
            yield title, where(self.frozen, teacher=teacher), FROZEN_CONTRASTS
        for title, rows in (("towers", self.towers), ("ViT-S/8", self.gpu)):
            for teacher in TOWER_TEACHERS:
                both = [row for row in rows if row["teacher"] in (teacher, NO_TEACHER)]
                own = both if where(both, teacher=teacher) else []
                asked = (
                    each
                    for each in TOWER_CONTRASTS
                    if teacher in _OF_SOME.get(each.arm, TOWER_TEACHERS)
                )
                yield f"{title}, {TITLES[teacher]}", own, tuple(asked)
