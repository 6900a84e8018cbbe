"""The blocks of the page of details: every table of the study that decides."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from studies.losses.frozen.arms import FEATURES, NAMED_SEEDS, SWEEP_SEEDS, Arm
from studies.losses.frozen.features import TEACHERS
from studies.losses.frozen.tier import FROZEN
from studies.losses.instrument.asked import ASKED
from studies.losses.instrument.paired import seeds_for
from studies.losses.marked import table
from studies.losses.mosaics.tier import MOSAICS
from studies.losses.scales.arms import pair_arms
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
    Contrast,
    Finding,
    corrected,
    findings,
    interval_text,
    points,
    seeds_text,
    told_apart,
)
from studies.losses.verdict.evidence import (
    OF_HELD_OUT,
    PROBE,
    SET_SIZES,
    UNSEEN,
    Row,
    by_arm,
    mean_of,
    unseen_sets,
    where,
)
from studies.losses.verdict.headlines import NOT_ENOUGH, rest_cell
from studies.losses.verdict.over_images import over_images
from studies.losses.verdict.resting import (
    at_rest,
    comparable_arms,
    reading_error,
    resting_arms,
    surface,
)
from studies.losses.verdict.scale_effects import (
    LEARNED_CONTRASTS,
    learned_lines,
    pair_lines,
)
from studies.losses.verdict.tested import tested

# The half width that each experiment was planned for.
_BARS: Final = {FROZEN: 0.0015, TOWERS: 0.003, "ViT-S/8": 0.003}


def hypotheses(every: AllRows) -> str:
    """Returns a table of each source: unseen classes, held-out photographs and the probe."""
    by_measure = [tested(every, each) for each in (UNSEEN, OF_HELD_OUT, PROBE)]
    parts = []
    for title in by_measure[0]:
        bar = _BARS[title.partition(",")[0]]
        lines = [["", "unseen classes", "p (Holm)", "p (equal)", "says", "held out", "probe"]]
        lines[0] += ["seeds", f"for ± {100 * bar:.2g}"]
        least: list[int] = []
        for unseen, *others in zip(*(each[title] for each in by_measure), strict=True):
            least.append(unseen.seeds)
            lines.append([unseen.title, *_finding_cells(unseen), *map(told_apart, others)])
            lines[-1] += _seeds_cells(unseen, bar)
        parts.append(f"**{title}**, {_seeds_between(least, _planned(title))}\n\n{table(lines)}")
    return "\n\n".join(parts) or NOT_ENOUGH


def sets(every: AllRows) -> str:
    """Returns the named differences on each set of unseen classes."""
    lines = [["5-NN, points", *ASKED]]
    for title, rows, contrasts in every.sources:
        seen = set(ASKED).difference(*(unseen_sets(row) for row in rows[:1])) if rows else set()
        of_set = [findings(by_arm(rows, f"knn_{name}"), contrasts) for name in ASKED]
        for found in zip(*of_set, strict=True):
            if found[0].difference is not None:
                cells = (
                    f"{points(each.difference)}{' (seen)' if name in seen else ''}"
                    for name, each in zip(ASKED, found, strict=True)
                )
                lines.append([f"{title}: {found[0].title}", *cells])
    return table(lines) if len(lines) > 1 else NOT_ENOUGH


def _seeds_between(found: Sequence[int], planned: int) -> str:
    """Returns the seeds of the contrasts of a table, such as `3 to 12 of 24 seeds`, or `24 to 64
    seeds` where noisy arms have more than the others.
    """
    least, most = min(found), max(found)
    number = str(most) if least == most else f"{least} to {most}"
    return f"{number} seeds" if most > planned <= least else f"{number} of {planned} seeds"


def _planned(title: str) -> int:
    sizes = {"frozen": NAMED_SEEDS, "towers": ON_CPU.seeds, "ViT-S/8": ON_GPU.seeds}
    return len(sizes[title.partition(",")[0]])


def _finding_cells(finding: Finding) -> list[str]:
    if finding.difference is None:
        return [finding.missing, "", "", ""]
    return [
        told_apart(finding),
        f"{finding.p:.2g}",
        f"{finding.difference.p_equal:.2g}",
        finding.verdict,
    ]


def _seeds_cells(finding: Finding, bar: float) -> list[str]:
    if finding.difference is None or not 0 < finding.difference.half_width < math.inf:
        return [str(finding.seeds), ""]
    return [str(finding.seeds), str(seeds_for(finding.difference, finding.seeds, bar))]


def image_intervals(every: AllRows) -> str:
    """Returns the intervals over images and seeds, beside those over seeds alone."""
    lines = []
    for title, rows, contrasts in every.sources:
        for contrast, finding in zip(
            contrasts, findings(by_arm(rows, UNSEEN), contrasts), strict=True
        ):
            if finding.difference is None:
                continue
            own, other = (where(rows, arm=each) for each in (contrast.arm, contrast.other))
            drawn = over_images(own, other, SET_SIZES)
            both = interval_text(drawn.mean, drawn.half_width)
            apart = f"{100 * drawn.disagreement:.1f}"
            name = f"{title}: {finding.title}"
            lines.append([name, points(finding.difference), both, apart])
    if not lines:
        return NOT_ENOUGH
    header = ["", "over seeds", "over images and seeds", "disagreement, % of images"]
    return table([header, *lines])


def resting(every: AllRows) -> str:
    """Returns Eq. 5 less Eq. 4 at Eq. 4's resting cosine, of each teacher and scale."""
    lines = []
    for teacher in TEACHERS:
        rows = where(every.frozen, teacher=teacher)
        for scale in (8.0, 16.0, 32.0):
            found = [at_rest(rows, measure, scale) for measure in (UNSEEN, OF_HELD_OUT)]
            planned = len({row["seed"] for row in where(rows, arm=Arm("mlc", scale=scale).name)})
            if (first := found[0]) is not None:
                equal = "yes" if first.difference.p_equal < CLEAR else "not shown"
                lines.append([f"{TITLES[teacher]}, s = {scale:g}", f"{first.cosine:.3f}",
                              *map(rest_cell, found), equal,
                              seeds_text(first.seeds, planned)])  # fmt: skip
            elif planned:
                apart = "outside of the biases' range"
                lines.append([f"{TITLES[teacher]}, s = {scale:g}", "", apart, "", "", ""])
    if not lines:
        return NOT_ENOUGH
    header = ["clusters of", "Eq. 4's cos+", "unseen classes", "held out", "equal within 0.5",
              "seeds"]  # fmt: skip
    error = max(reading_error(where(every.frozen, teacher=teacher)) for teacher in TEACHERS)
    said = f"A bias that is left out is read from the others to within {100 * error:.2f} points."
    return f"{table([header, *lines])}\n\n{said}"


def surfaces(every: AllRows) -> str:
    """Returns what the place explains, and what the form of the loss adds."""
    lines = []
    for teacher in TEACHERS:
        rows = where(every.frozen, teacher=teacher)
        for title, arms in (("MLC, MLCD, l = 8", comparable_arms()), ("all", resting_arms())):
            found = surface(rows, arms)
            if found is not None:
                offsets = (
                    interval_text(*found.offsets[form]) if form in found.offsets else ""
                    for form in ("mlc", "cd", "per_column", "bce")
                )
                shares = (found.explained, found.left_out, found.by_cosines, found.by_form)
                lines.append([f"{TITLES[teacher]}, {title}", str(found.num_arms),
                              *(f"{100 * share:.1f}" for share in shares),
                              f"{found.p:.2g}", *offsets])  # fmt: skip
    if not lines:
        return NOT_ENOUGH
    explained = ("explained by (cos+, cos-, s), %", "each arm from the others, %")
    rest = ("by (cos+, cos-) alone, %", "by the form besides, %", "p")
    forms = ("mlc - mlcd there", "cd", "per_column", "bce")
    header = ["clusters of", "arms", *explained, *rest, *forms]
    return table([header, *lines])


def sweep_tables(every: AllRows) -> str:
    """Returns every arm of the frozen tier, and what it is less the default MLCD."""
    parts = []
    for teacher in TEACHERS:
        rows = where(every.frozen, teacher=teacher)
        if rows:
            title = f"<summary>Clusters of {TITLES[teacher]}</summary>"
            lines = table(list(_sweep_lines(rows)))
            inside = "\n\n".join([*_of_features(rows), lines])
            parts.append(f'<details markdown="1">\n{title}\n\n{inside}\n\n</details>')
    return "\n\n".join(parts) or NOT_ENOUGH


def _of_features(rows: Sequence[Row]) -> Iterator[str]:
    if asked := where(rows, arm=FEATURES):
        unseen, held_out = (100 * mean_of(asked, each) for each in (UNSEEN, OF_HELD_OUT))
        yield f"The features themselves: unseen {unseen:.2f}, held out {held_out:.2f}."


def _sweep_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    yield ["arm", "unseen", "less mlcd", "held out", "less mlcd", "cos+", "cos-", "seeds"]
    unseen, held_out = (by_arm(rows, each) for each in (UNSEEN, OF_HELD_OUT))
    for name in sorted(unseen.keys() - {FEATURES}):
        own = where(rows, arm=name)
        against = [Contrast(name, name, Arm().name)]
        less = (
            "" if name == Arm().name or (found := findings(each, against)[0]).difference is None
            else points(found.difference)
            for each in (unseen, held_out)
        )  # fmt: skip
        yield [
            name,
            f"{100 * mean_of(own, UNSEEN):.2f}",
            next(less),
            f"{100 * mean_of(own, OF_HELD_OUT):.2f}",
            next(less),
            f"{mean_of(own, 'positive_cosine'):.3f}",
            f"{mean_of(own, 'negative_cosine'):.3f}",
            str(len(own)),
        ]


def starts(every: AllRows) -> str:
    """Returns a classifier that starts from k-means centers less one from random rows."""
    lines = [["clusters of", "unseen classes", "p (Holm)", "p (equal)", "says", "held out", "probe",
              "seeds"]]  # fmt: skip
    of_measure = [_of_starts(every, each) for each in (UNSEEN, OF_HELD_OUT, PROBE)]
    for teacher in TEACHERS:
        unseen, *others = (found[teacher][0] for found in of_measure)
        done = seeds_text(unseen.seeds, len(SWEEP_SEEDS))
        lines.append([TITLES[teacher], *_finding_cells(unseen), *map(told_apart, others), done])
    return table(lines)


def _of_starts(every: AllRows, measure: str) -> dict[str, list[Finding]]:
    return corrected(
        {
            teacher: findings(
                by_arm(where(every.frozen, teacher=teacher), measure), [START_CONTRAST]
            )
            for teacher in TEACHERS
        }
    )


def learned(every: AllRows) -> str:
    """Returns learned scalars against fixed ones: the named comparison, then over k and s."""
    rows = where(every.scales, experiment="learned")
    if not rows:
        return NOT_ENOUGH
    lines = [["k = 1,000, s = 16", "unseen classes", "p (Holm)", "p (equal)", "says", "held out"]]
    of_measure = (
        corrected({each: findings(by_arm(rows, each), LEARNED_CONTRASTS)})[each]
        for each in (UNSEEN, OF_HELD_OUT)
    )
    seeds = []
    for unseen, held_out in zip(*of_measure, strict=True):
        seeds.append(unseen.seeds)
        lines.append([unseen.title, *_finding_cells(unseen), told_apart(held_out)])
    named = f"{seeds_text(min(seeds), len(NAMED_SEEDS))}\n\n{table(lines)}"
    return f"{named}\n\n{table(list(learned_lines(rows)))}"


def pairs(every: AllRows) -> str:
    """Returns the batch-size study of both losses of pairs."""
    rows = where(every.scales, experiment="pairs")
    if not rows:
        return NOT_ENOUGH
    done = by_arm(rows, "retrieval")
    seeds = min(len(done.get(arm.name, {})) for arm in pair_arms())
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
