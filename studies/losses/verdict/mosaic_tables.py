"""The blocks of the page of details on mosaics."""

from collections.abc import Iterator, Sequence
from typing import Final

from studies.losses.frozen.arms import Arm
from studies.losses.marked import table
from studies.losses.mosaics.arms import MOSAIC_ARMS, MOSAIC_SEEDS, MOSAIC_TEACHERS
from studies.losses.mosaics.tiles import OBJECTS
from studies.losses.verdict.all_rows import TITLES, AllRows
from studies.losses.verdict.contrasts import interval_text, points, seeds_text
from studies.losses.verdict.evidence import UNSEEN, Row, where
from studies.losses.verdict.headlines import NOT_ENOUGH
from studies.losses.verdict.mosaic_effects import (
    COVARIATES,
    Effect,
    by_objects,
    covariate_effects,
    trend,
)

_MOSAIC_MEASURES: Final = {
    UNSEEN: "single photographs of unseen classes",
    "tiles": "mosaics of unseen classes, of as many objects",
    "map_coco_multi_captions": "mAP of COCO's objects",
    "map_fashion_products": "mAP of fashion's attributes",
}


_INFLATED: Final = 10.0  # the usual bound, above which an effect is not told from the others'


def mosaics(every: AllRows) -> str:
    """Returns the contrasts by the number of objects trained on, and the trend of MLCD - CD."""
    parts = []
    for teacher in MOSAIC_TEACHERS:
        rows = where(every.mosaics, teacher=teacher)
        if not rows:
            continue
        of_k = where(rows, clusters=Arm().clusters)
        lines = [["", "1 object", "2 objects", "4 objects", "for each doubling"]]
        for measure, title in _MOSAIC_MEASURES.items():
            lines += _mosaic_lines(of_k, measure, title)
        seeds = min(len(own) for own in _seeds_of_cells(of_k).values())
        heading = f"**{TITLES[teacher]}**, {seeds_text(seeds, len(MOSAIC_SEEDS))}"
        parts.append(f"{heading}\n\n{table(lines)}")
    return "\n\n".join(parts) or NOT_ENOUGH


def _seeds_of_cells(rows: Sequence[Row]) -> dict[tuple[str, int], set[int]]:
    """Returns the seeds of each arm and number of objects, none where it is not run."""
    found: dict[tuple[str, int], set[int]] = {
        (arm.name, objects): set() for arm in MOSAIC_ARMS.values() for objects in OBJECTS
    }
    for row in rows:
        found[row["arm"], row["objects"]].add(row["seed"])
    return found


def _mosaic_lines(rows: Sequence[Row], measure: str, title: str) -> Iterator[list[str]]:
    found = by_objects(rows, measure)
    slope = trend(rows, measure)
    for place, of_objects in enumerate(zip(*found.values(), strict=True)):
        cells = [points(each.difference) for each in of_objects]
        grows = interval_text(slope.mean, slope.half_width) if slope and place == 0 else ""
        yield [f"{title}: {of_objects[0].title}", *cells, grows]


def covariates(every: AllRows) -> str:
    """Returns what a standard deviation of each covariate adds to MLCD - CD."""
    lines = []
    for teacher in MOSAIC_TEACHERS:
        rows = where(every.mosaics, teacher=teacher)
        for measure, title in _MOSAIC_MEASURES.items():
            if rows and (found := covariate_effects(rows, measure)) is not None:
                cells = (_effect_cell(found.get(name)) for name in COVARIATES)
                lines.append([f"{TITLES[teacher]}: {title}", *cells])
    if not lines:
        return NOT_ENOUGH
    return table([["MLCD - CD, points for a deviation", *COVARIATES], *lines])


def _effect_cell(effect: Effect | None) -> str:
    if effect is None:
        return ""
    text = interval_text(effect.mean, effect.half_width)
    told = text.strip("*") if effect.inflation > _INFLATED else text
    return f"{told} ({effect.inflation:.1f})"
