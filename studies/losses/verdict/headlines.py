"""The blocks of the first page: the answer in a sentence and in a table, claims, and progress."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from studies.losses.frozen.arms import NAMED, NAMED_SEEDS, FeaturesRun, FrozenRun, all_runs
from studies.losses.frozen.features import TEACHERS
from studies.losses.instrument.rows import SlicedRun
from studies.losses.marked import table
from studies.losses.mosaics.arms import all_mosaic_runs
from studies.losses.scales.arms import all_scales_runs
from studies.losses.towers.arms import (
    ON_CPU,
    ON_GPU,
    TOWER_TEACHERS,
    all_tower_runs,
)
from studies.losses.verdict.all_rows import (
    FROZEN_CONTRASTS,
    TITLES,
    TOWER_CONTRASTS,
    AllRows,
)
from studies.losses.verdict.contrasts import (
    CLEAR,
    Finding,
    points,
    seeds_text,
    told_apart,
)
from studies.losses.verdict.evidence import (
    OF_HELD_OUT,
    UNSEEN,
    Row,
    by_arm,
)
from studies.losses.verdict.resting import AtRest
from studies.losses.verdict.tested import AT_ONE_COSINE, tested

_SIGNS: Final = {
    "higher": "↑", "lower": "↓",
    "higher, by less than 0.5": "↑ <", "lower, by less than 0.5": "↓ <",
    "equal within 0.5": "=", "not told apart": "?", "not run": "",
}  # fmt: skip
_OF_FORM: Final = "MLCD - MLC"
NOT_ENOUGH: Final = "Not run yet, or too few runs."


def headline(every: AllRows) -> str:
    """Returns the answer to the question in a sentence for each teacher, frozen and in towers."""
    found = tested(every, UNSEEN)
    lines = [*_frozen_headlines(found), *_tower_headlines(found)]
    return "\n".join(lines)


def _frozen_headlines(found: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    for teacher in TEACHERS:
        of_title = {each.title: each for each in found.get(f"frozen, {TITLES[teacher]}", [])}
        as_it_comes, there = (of_title.get(name) for name in (_OF_FORM, AT_ONE_COSINE))
        name = f"frozen features, clusters of {TITLES[teacher]}"
        if as_it_comes is None or there is None or there.difference is None:
            yield f"- {name}: not finished, or never at one cosine"
            continue
        yield (
            f"- {name}: {told_apart(as_it_comes)} as they come, {told_apart(there)} at one cosine, "
            f"{_equality(there)} ({seeds_text(there.seeds, len(NAMED_SEEDS))})"
        )


def _tower_headlines(found: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    for teacher in TOWER_TEACHERS:
        of_title = {each.title: each for each in found.get(f"towers, {TITLES[teacher]}", [])}
        as_it_comes = of_title.get(_OF_FORM)
        if as_it_comes is not None and as_it_comes.difference is not None:
            seeds = seeds_text(as_it_comes.seeds, len(ON_CPU.seeds))
            yield (
                f"- towers from pixels, clusters of {TITLES[teacher]}: {told_apart(as_it_comes)} "
                f"as they come, {_equality(as_it_comes)} ({seeds})"
            )


def _equality(finding: Finding) -> str:
    assert finding.difference is not None
    shown = finding.difference.p_equal < CLEAR
    return "equal within 0.5" if shown else "equality is not shown"


def answer(every: AllRows) -> str:
    """Returns the headline: every named difference on unseen classes, wherever it was run."""
    shown = tested(every, UNSEEN)
    if not shown:
        return NOT_ENOUGH
    contrasts = (*FROZEN_CONTRASTS, *TOWER_CONTRASTS)
    titles = dict.fromkeys([*(each.title for each in contrasts), AT_ONE_COSINE])
    columns = [{each.title: _cell(each) for each in found} for found in shown.values()]
    lines = [[title, *(column.get(title, "") for column in columns)] for title in titles]
    run = [line for line in lines if any(line[1:])]
    return table([["points, unseen classes", *shown], *run])


def _cell(finding: Finding) -> str:
    if finding.difference is None:
        return ""
    return f"{told_apart(finding)} {_SIGNS[finding.verdict]}"


def rest_cell(found: AtRest | None) -> str:
    return "" if found is None else points(found.difference)


def claims(every: AllRows) -> str:
    """Returns what became of a claim of the paper, and of one of the first study."""
    nearer = "; ".join(_nearer(every)) or "no run yet"
    several = "; ".join(_several(every)) or "not run yet"
    return (
        "- **The paper's Fig. 3c**: MLCD draws positives nearer than MLC. Here MLC's mean cosine "
        f"is the higher one in {nearer}.\n"
        "- **Our first page**: several labels beat one. Here MLCD less CD is, on unseen classes "
        f"and on other photographs of the classes trained on, {several}."
    )


def _nearer(every: AllRows) -> Iterator[str]:
    """Yields where MLC rests above MLCD."""
    mlc, mlcd = (NAMED[name].name for name in ("MLC", "MLCD"))
    for title, rows, _ in every.sources:
        cosines = by_arm(rows, "positive_cosine")
        if seeds := sorted(cosines.get(mlc, {}).keys() & cosines.get(mlcd, {}).keys()):
            higher = sum(cosines[mlc][seed] > cosines[mlcd][seed] for seed in seeds)
            means = (float(np.mean([cosines[arm][seed] for seed in seeds])) for arm in (mlc, mlcd))
            both = " and ".join(f"{mean:.2f}" for mean in means)
            yield f"{higher} of {len(seeds)} seeds, {both} ({title})"


def _several(every: AllRows) -> Iterator[str]:
    """Yields what several labels have over one."""
    unseen, held_out = (tested(every, each) for each in (UNSEEN, OF_HELD_OUT))
    for title, found in unseen.items():
        for ours, theirs in zip(found, held_out[title], strict=True):
            if ours.title == "MLCD - CD" and ours.difference is not None:
                yield f"{told_apart(ours)} and {told_apart(theirs)} ({title})"


def progress(every: AllRows) -> str:
    """Returns how many of the planned runs of each tier are finished."""
    named = [run for run in all_runs() if _is_named(run)]
    swept = [run for run in all_runs() if not _is_named(run)]
    lines = [
        _progress_line(title, planned, rows)
        for title, planned, rows in (
            ("frozen: named hypotheses", named, every.frozen),
            ("frozen: sweeps", swept, every.frozen),
            ("towers", all_tower_runs(ON_CPU), every.towers),
            ("mosaics", all_mosaic_runs(), every.mosaics),
            ("scales", all_scales_runs(), every.scales),
            ("gpu", all_tower_runs(ON_GPU), every.gpu),
        )
    ]
    return table([["tier", "runs", "arms that have all of their seeds"], *lines])


def _is_named(run: FrozenRun | FeaturesRun) -> bool:
    return isinstance(run, FrozenRun) and run.arm in NAMED.values()


def _progress_line(title: str, planned: Iterable[SlicedRun], rows: Sequence[Row]) -> list[str]:
    names = {row["run"] for row in rows}
    of_arm: dict[str, list[bool]] = {}
    for run in planned:
        of_arm.setdefault(run.name.rpartition("/seed")[0], []).append(run.name in names)
    finished, total = (sum(map(each, of_arm.values())) for each in (sum, len))
    whole = sum(map(all, of_arm.values()))
    return [title, f"{finished:,} of {total:,}", f"{whole} of {len(of_arm)}"]
