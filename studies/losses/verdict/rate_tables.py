"""The block of the page of details on other rates of learning and more steps."""

from dataclasses import replace
from typing import Any, Final

from studies.losses.frozen.arms import NAMED, SWEEP_SEEDS, Arm
from studies.losses.frozen.features import TEACHERS
from studies.losses.marked import table
from studies.losses.verdict.all_rows import TITLES, AllRows
from studies.losses.verdict.contrasts import Contrast, findings, points
from studies.losses.verdict.evidence import UNSEEN, Row, by_arm, where

_TRAINED: Final[dict[str, dict[str, Any]]] = {
    "a third of the rate": {"rate": 1 / 3},
    "the rate of the recipes": {},
    "three times the rate": {"rate": 3.0},
    "three times the steps": {"steps": 900},
}
_AGAINST_MLCD: Final = {
    "MLC": NAMED["MLC"],
    "CD": NAMED["CD"],
    "per_column": NAMED["per_column"],
    "MLCD(s = 8)": Arm(scale=8.0),
}


def other_rates(every: AllRows) -> str:
    """Returns MLCD less other losses where both are trained at another rate or for longer."""
    lines = [["unseen classes", *_TRAINED]]
    for teacher in TEACHERS:
        of_teacher = where(every.frozen, teacher=teacher)
        rows = [row for row in of_teacher if row["seed"] in SWEEP_SEEDS]
        for name, arm in _AGAINST_MLCD.items():
            lines.append([f"{TITLES[teacher]}: MLCD - {name}", *_cells(rows, arm)])
    return table(lines)


def _cells(rows: list[Row], arm: Arm) -> list[str]:
    contrasts = [
        Contrast(title, replace(NAMED["MLCD"], **changed).name, replace(arm, **changed).name)
        for title, changed in _TRAINED.items()
    ]
    return [
        each.missing if each.difference is None else points(each.difference)
        for each in findings(by_arm(rows, UNSEEN), contrasts)
    ]
