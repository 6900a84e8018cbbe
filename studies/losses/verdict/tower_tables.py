"""The block of the page of details on towers: every arm of every teacher."""

from collections.abc import Iterator, Sequence

from studies.losses.marked import table
from studies.losses.towers.arms import NO_TEACHER, TOWER_TEACHERS
from studies.losses.verdict.all_rows import TITLES, AllRows
from studies.losses.verdict.evidence import OF_HELD_OUT, PROBE, UNSEEN, Row, mean_of, where
from studies.losses.verdict.headlines import NOT_ENOUGH

_MEASURES = (UNSEEN, OF_HELD_OUT, PROBE)
_TITLES = {**TITLES, NO_TEACHER: "no teacher"}


def tower_arms(every: AllRows) -> str:
    """Returns the accuracies of each arm, and the cosines at which it rests."""
    lines = [
        line
        for teacher in (*TOWER_TEACHERS, NO_TEACHER)
        for line in _arm_lines(_TITLES[teacher], where(every.towers, teacher=teacher))
    ]
    header = ["clusters of", "arm", "unseen", "held out", "probe", "cos+", "cos-", "seeds"]
    return table([header, *lines]) if lines else NOT_ENOUGH


def _arm_lines(title: str, rows: Sequence[Row]) -> Iterator[list[str]]:
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = where(rows, arm=arm)
        accuracies = (f"{100 * mean_of(own, each):.2f}" for each in _MEASURES)
        cosines = (f"{mean_of(own, f'{each}_cosine'):.3f}" for each in ("positive", "negative"))
        yield [title, arm, *accuracies, *cosines, str(len(own))]
