"""The blocks of the page of details: every table of the study that decides."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from studies.losses.frozen.arms import NAMED_SEEDS, SWEEP_SEEDS, Arm
from studies.losses.frozen.features import TEACHERS
from studies.losses.frozen.tier import FROZEN
from studies.losses.instrument.pooled import Pooled
from studies.losses.marked import table
from studies.losses.mosaics.arms import MOSAIC_SEEDS, MOSAIC_TEACHERS
from studies.losses.mosaics.tier import MOSAICS
from studies.losses.scales.tier import SCALES
from studies.losses.towers.arms import (
    ON_CPU,
    ON_GPU,
)
from studies.losses.towers.tier import GPU, TOWERS
from studies.losses.verdict.all_rows import (
    START_CONTRAST,
    TITLES,
    AllRows,
)
from studies.losses.verdict.contrasts import (
    CLEAR,
    MARGIN,
    Finding,
    findings,
    interval_text,
    points,
    seeds_text,
)
from studies.losses.verdict.evidence import (
    OF_HELD_OUT,
    PROBE,
    SET_SIZES,
    UNSEEN,
    Row,
    by_arm,
    mean_of,
    where,
)
from studies.losses.verdict.headlines import NOT_ENOUGH, rest_cell
from studies.losses.verdict.mosaic_effects import by_objects, covariate_effects, trend
from studies.losses.verdict.over_images import over_images
from studies.losses.verdict.resting import at_rest, surface
from studies.losses.verdict.scale_effects import (
    LEARNED_CONTRASTS,
    learned_lines,
    pair_lines,
)


def hypotheses(every: AllRows) -> str:
    """Returns a table of each source: unseen classes, held-out photographs and the probe."""
    parts = []
    for title, rows, contrasts in every.sources:
        if not rows:
            continue
        lines = [["", "unseen classes", "p (Holm)", "p (equal)", "says", "held out", "probe"]]
        of_measure = (
            findings(by_arm(rows, each), contrasts) for each in (UNSEEN, OF_HELD_OUT, PROBE)
        )
        least: list[int] = []
        for unseen, held_out, probe in zip(*of_measure, strict=True):
            least.append(unseen.seeds)
            lines.append([unseen.contrast.title, *_finding_cells(unseen),
                          points(held_out.difference), points(probe.difference)])  # fmt: skip
        parts.append(f"**{title}**, {_seeds_between(least, _planned(title))}\n\n{table(lines)}")
    return "\n\n".join(parts) or NOT_ENOUGH


def _seeds_between(found: Sequence[int], planned: int) -> str:
    """Returns the seeds of the contrasts of a table, such as `3 to 12 of 24 seeds`."""
    least, most = min(found), max(found)
    return seeds_text(most, planned) if least == most else f"{least} to {seeds_text(most, planned)}"


def _planned(title: str) -> int:
    sizes = {"frozen": NAMED_SEEDS, "towers": ON_CPU.seeds, "ViT-S/8": ON_GPU.seeds}
    return len(sizes[title.partition(",")[0]])


def _finding_cells(finding: Finding) -> list[str]:
    if finding.difference is None:
        return ["not run", "", "", ""]
    return [
        points(finding.difference),
        f"{finding.p:.2g}",
        f"{finding.difference.p_equal:.2g}",
        finding.verdict,
    ]


def image_intervals(every: AllRows) -> str:
    """Returns the intervals over images and seeds, beside those over seeds alone."""
    lines = []
    for title, rows, contrasts in every.sources:
        for finding in findings(by_arm(rows, UNSEEN), contrasts):
            if finding.difference is None:
                continue
            own, other = (
                where(rows, arm=each) for each in (finding.contrast.arm, finding.contrast.other)
            )
            drawn = over_images(own, other, SET_SIZES)
            interval = f"{100 * drawn.low:+.2f} to {100 * drawn.high:+.2f}"
            apart = f"{100 * drawn.disagreement:.1f}"
            name = f"{title}: {finding.contrast.title}"
            lines.append([name, points(finding.difference), interval, apart])
    if not lines:
        return NOT_ENOUGH
    header = ["", "over seeds", "over images and seeds, 95 %", "disagreement, % of images"]
    return table([header, *lines])


def resting(every: AllRows) -> str:
    """Returns Eq. 5 less Eq. 4 at Eq. 4's resting cosine, of each teacher."""
    lines = []
    for teacher in TEACHERS:
        rows = where(every.frozen, teacher=teacher)
        found = [at_rest(rows, measure) for measure in (UNSEEN, OF_HELD_OUT)]
        if (first := found[0]) is not None:
            equal = "yes" if first.difference.p_equal < CLEAR else "not shown"
            lines.append([TITLES[teacher], f"{first.cosine:.3f}", *map(rest_cell, found), equal,
                          seeds_text(first.seeds, len(NAMED_SEEDS))])  # fmt: skip
    if not lines:
        return NOT_ENOUGH
    header = [
        "clusters of",
        "Eq. 4's cos+",
        "unseen classes",
        "held out",
        "equal within 0.5",
        "seeds",
    ]
    return table([header, *lines])


def surfaces(every: AllRows) -> str:
    """Returns what the place explains, and what the form of the loss adds."""
    lines = []
    for teacher in TEACHERS:
        found = surface(where(every.frozen, teacher=teacher))
        if found is not None:
            offsets = (
                interval_text(*found.offsets[form]) if form in found.offsets else ""
                for form in ("mlc", "cd", "per_column", "bce")
            )
            lines.append([TITLES[teacher], str(found.num_arms), f"{100 * found.explained:.1f}",
                          f"{100 * found.by_form:.1f}", f"{found.p:.2g}", *offsets])  # fmt: skip
    if not lines:
        return NOT_ENOUGH
    explained = ("explained by (cos+, cos-, s), %", "by the form besides, %", "p")
    header = ["clusters of", "arms", *explained, "mlc - mlcd there", "cd", "per_column", "bce"]
    return table([header, *lines])


def sweep_tables(every: AllRows) -> str:
    """Returns every arm of the frozen tier, and what it is less the default MLCD."""
    parts = []
    for teacher in TEACHERS:
        rows = where(every.frozen, teacher=teacher)
        if rows:
            lines = table(list(_sweep_lines(rows)))
            title = f"<summary>Clusters of {TITLES[teacher]}</summary>"
            parts.append(f'<details markdown="1">\n{title}\n\n{lines}\n\n</details>')
    return "\n\n".join(parts) or NOT_ENOUGH


def _sweep_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    yield ["arm", "unseen", "less mlcd", "held out", "cos+", "cos-", "seeds"]
    values = by_arm(rows, UNSEEN)
    default = Arm().name
    seeds = values.get(default, {}).keys()
    shared = {name: own for name, own in values.items() if len(own.keys() & seeds) >= 3}
    pooled = Pooled.of(shared) if len(shared) > 1 else None
    for name in sorted(values):
        own = where(rows, arm=name)
        less = ""
        if pooled is not None and name in shared and name != default:
            less = points(pooled.difference(name, default, margin=MARGIN))
        yield [
            name,
            f"{100 * mean_of(own, UNSEEN):.2f}",
            less,
            f"{100 * mean_of(own, OF_HELD_OUT):.2f}",
            f"{mean_of(own, 'positive_cosine'):.3f}",
            f"{mean_of(own, 'negative_cosine'):.3f}",
            str(len(own)),
        ]


def starts(every: AllRows) -> str:
    """Returns a classifier that starts from k-means centers less one from random rows."""
    header = ["clusters of", "unseen classes", "p (equal)", "says", "held out", "probe", "seeds"]
    lines = [header]
    for teacher in TEACHERS:
        rows = where(every.frozen, teacher=teacher)
        unseen, held_out, probe = (
            findings(by_arm(rows, each), [START_CONTRAST])[0]
            for each in (UNSEEN, OF_HELD_OUT, PROBE)
        )
        difference, _, equal, says = _finding_cells(unseen)
        others = [points(each.difference) for each in (held_out, probe)]
        done = seeds_text(unseen.seeds, len(SWEEP_SEEDS))
        lines.append([TITLES[teacher], difference, equal, says, *others, done])
    return table(lines)


_MOSAIC_MEASURES: Final = {
    "tiles": "mosaics of unseen classes",
    UNSEEN: "single photographs of unseen classes",
    "map_coco_multi_captions": "mAP of COCO's objects",
    "map_fashion_products": "mAP of fashion's attributes",
}


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
        seeds = len({row["seed"] for row in of_k})
        heading = f"**{TITLES[teacher]}**, {seeds_text(seeds, len(MOSAIC_SEEDS))}"
        parts.append(f"{heading}\n\n{table(lines)}")
    return "\n\n".join(parts) or NOT_ENOUGH


def _mosaic_lines(rows: Sequence[Row], measure: str, title: str) -> Iterator[list[str]]:
    found = by_objects(rows, measure)
    slope = trend(rows, measure)
    for place, contrast in enumerate(each.contrast for each in next(iter(found.values()))):
        cells = [points(each[place].difference) for each in found.values()]
        grows = interval_text(slope.mean, slope.half_width) if slope and place == 0 else ""
        yield [f"{title}: {contrast.title}", *cells, grows]


def covariates(every: AllRows) -> str:
    """Returns what a standard deviation of each covariate adds to MLCD - CD."""
    lines = []
    for teacher in MOSAIC_TEACHERS:
        rows = where(every.mosaics, teacher=teacher)
        for measure, title in _MOSAIC_MEASURES.items():
            if rows and (found := covariate_effects(rows, measure)) is not None:
                cells = (
                    interval_text(found[name].mean, found[name].half_width) if name in found else ""
                    for name in ("purity", "conflict", "log2 objects")
                )
                lines.append([f"{TITLES[teacher]}: {title}", *cells])
    if not lines:
        return NOT_ENOUGH
    return table([["MLCD - CD, points for a deviation", "purity", "conflict", "objects"], *lines])


def learned(every: AllRows) -> str:
    """Returns learned scalars against fixed ones: the named comparison, then over k and s."""
    rows = where(every.scales, experiment="learned")
    if not rows:
        return NOT_ENOUGH
    lines = [["k = 1,000, s = 16", "unseen classes", "p (Holm)", "p (equal)", "says", "held out"]]
    of_measure = (findings(by_arm(rows, each), LEARNED_CONTRASTS) for each in (UNSEEN, OF_HELD_OUT))
    seeds = 0
    for unseen, held_out in zip(*of_measure, strict=True):
        seeds = max(seeds, unseen.seeds)
        lines.append([unseen.contrast.title, *_finding_cells(unseen), points(held_out.difference)])
    named = f"{seeds_text(seeds, len(NAMED_SEEDS))}\n\n{table(lines)}"
    return f"{named}\n\n{table(list(learned_lines(rows)))}"


def pairs(every: AllRows) -> str:
    """Returns the batch-size study of both losses of pairs."""
    rows = where(every.scales, experiment="pairs")
    if not rows:
        return NOT_ENOUGH
    seeds = min(len(own) for own in by_arm(rows, "retrieval").values())
    return f"{seeds_text(seeds, len(NAMED_SEEDS))}\n\n{table(list(pair_lines(rows)))}"


def facts(every: AllRows) -> str:
    """Returns runs, hours of a core, hardware and commits of each tier."""
    lines = [["tier", "runs", "hours of a core", "seconds a run, median", "hardware", "commits"]]
    for title in (FROZEN, TOWERS, MOSAICS, SCALES, GPU):
        rows: Sequence[Row] = getattr(every, title)
        if not rows:
            lines.append([title, "0", "", "", "", ""])
            continue
        seconds = [_seconds(row) for row in rows]
        machines = sorted({f"{row['device']}: {row['cpu']}, torch {row['torch']}" for row in rows})
        commits = sorted({row["commit"] for row in rows})
        figures = (f"{len(rows):,}", f"{sum(seconds) / 3600:.1f}", f"{np.median(seconds):.1f}")
        lines.append([title, *figures, "; ".join(machines), ", ".join(commits)])
    return table(lines)


def _seconds(row: Row) -> float:
    return sum(row.get(name) or 0.0 for name in ("cluster_s", "train_s", "evaluation_s"))
