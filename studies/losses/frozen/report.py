"""The tables of what the rows of the frozen tier say.

    python -m studies.losses.frozen.report [--results DIR]

The headline is the mean of four sets of unseen classes, all images asked. Differences are in
percentage points with 95 % intervals; equality is claimed where both one-sided tests at ± 0.5 pass.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import f as f_distribution
from scipy.stats import t

from studies.losses.frozen.arms import NAMED, Arm, sweeps
from studies.losses.frozen.features import TEACHERS
from studies.losses.frozen.tier import FROZEN
from studies.losses.instrument.asked import ASKED, HELD_OUT
from studies.losses.instrument.pooled import Difference, Pooled, holm
from studies.losses.instrument.rows import read_rows, table_of
from studies.losses.table import RESULTS

_MARGIN: Final = 0.005
_HYPOTHESES: Final = (
    ("MLCD", "MLC"),
    ("MLCD", "CD"),
    ("MLCD(b = +4)", "MLCD"),
    ("per_column", "MLCD"),
    ("learned s and b", "MLCD"),
)
_CLEAR: Final = 0.05
_FORMS: Final = ("cd", "per_column", "mlc", "mlcd", "bce")
_Row = Mapping[str, Any]
_ByArm = dict[str, dict[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    rows = read_rows(table_of(FROZEN, parser.parse_args().results))
    for teacher in TEACHERS:
        of_teacher = [row for row in rows if row["teacher"] == teacher]
        if of_teacher:
            print(f"## {teacher}: {len(of_teacher)} runs\n")
            for part in (_hypotheses, _resting_point, _surface, _swept):
                print("\n".join(part(of_teacher)) + "\n")


def unseen(row: _Row) -> float:
    """Returns the headline: the mean of the sets of unseen classes."""
    return float(np.mean([row[f"knn_{name}"] for name in ASKED]))


def by_arm(rows: Sequence[_Row], measure: str) -> _ByArm:
    """Returns the values of each arm by seed; measure: `unseen`, or a column."""
    found: _ByArm = defaultdict(dict)
    for row in rows:
        found[row["arm"]][row["seed"]] = unseen(row) if measure == "unseen" else row[measure]
    return found


def _hypotheses(rows: Sequence[_Row]) -> Iterator[str]:
    named = {name: arm.name for name, arm in NAMED.items()}
    yield "| hypothesis | unseen classes | p (Holm) | equal within 0.5 | held out | probe |"
    yield "|---|---:|---:|---|---:|---:|"
    found = [_differences(by_arm(rows, what), named) for what in ("unseen", f"knn_{HELD_OUT}")]
    probes = [by_arm(rows, f"probe_{name}") for name in ASKED]
    mean_probe = {
        arm: {seed: float(np.mean([each[arm][seed] for each in probes])) for seed in probes[0][arm]}
        for arm in probes[0]
    }
    found.append(_differences(mean_probe, named))
    if not found[0]:
        yield "| not run | | | | | |"
        return
    raised = holm([each.p for each in found[0]])
    for (arm, other), p, *each in zip(_HYPOTHESES, raised, *found, strict=True):
        equal = "yes" if each[0].p_equal < _CLEAR else "not shown"
        cells = " | ".join(map(_points, each[1:]))
        yield f"| {arm} - {other} | {_points(each[0])} | {p:.2g} | {equal} | {cells} |"


def _differences(values: _ByArm, named: Mapping[str, str]) -> list[Difference]:
    if any(arm not in values for arm in named.values()):
        return []
    pooled = Pooled.of({name: values[arm] for name, arm in named.items()})
    return [pooled.difference(arm, other, margin=_MARGIN) for arm, other in _HYPOTHESES]


def _resting_point(rows: Sequence[_Row]) -> Iterator[str]:
    """Yields Eq. 5 less Eq. 4 where both rest at the same positive cosine.

    For each seed the accuracy of Eq. 5 is read off between the biases whose cosines are around that
    of Eq. 4.
    """
    biased = [NAMED[name].name for name in ("MLCD(b = -8)", "MLCD(b = -4)", "MLCD", "MLCD(b = +4)")]
    accuracy, cosine = by_arm(rows, "unseen"), by_arm(rows, "positive_cosine")
    mlc, found = NAMED["MLC"].name, []
    for seed, resting in cosine.get(mlc, {}).items():
        if all(seed in cosine.get(arm, {}) for arm in biased):
            points = sorted((cosine[arm][seed], accuracy[arm][seed]) for arm in biased)
            cosines, accuracies = zip(*points, strict=True)
            there = float(np.interp(resting, cosines, accuracies))
            found.append(there - accuracy[mlc][seed])
    if len(found) < 2:
        yield "Equal resting point: not run."
        return
    error = float(np.std(found, ddof=1)) / len(found) ** 0.5
    half = float(t.ppf(0.975, len(found) - 1)) * error
    yield (
        f"Equal resting point: Eq. 5 less Eq. 4 at Eq. 4's positive cosine "
        f"{100 * np.mean(found):+.2f} ± {100 * half:.2f} ({len(found)} seeds)."
    )


def _surface(rows: Sequence[_Row]) -> Iterator[str]:
    """Yields how much of the accuracy of the swept arms (cos+, cos-, log s) explain, and how much
    the form of the loss adds.
    """
    arms = {arm.name: arm for arm in sweeps() if arm.margin == Arm().margin}
    means = {
        name: _means(rows, name)
        for name, arm in arms.items()
        if arm.clusters == Arm().clusters and arm.ratio == Arm().ratio
    }
    points = {name: found for name, found in means.items() if found is not None}
    if len(points) <= 10 + len(_FORMS):
        yield "Surface: too few arms."
        return
    values = np.array(list(points.values()))
    accuracy, place = values[:, 0], values[:, 1:]
    kinds = [arms[name].kind for name in points]
    forms = np.array([[kind == form for form in _FORMS[1:]] for kind in kinds], float)
    smooth = _quadratic((place - place.mean(axis=0)) / place.std(axis=0))
    left = [_left_over(smooth, accuracy), _left_over(np.hstack([smooth, forms]), accuracy)]
    whole = float(((accuracy - accuracy.mean()) ** 2).sum())
    more, freedom = forms.shape[1], len(accuracy) - smooth.shape[1] - forms.shape[1]
    ratio = (left[0] - left[1]) / more / (left[1] / freedom)
    yield (
        f"Surface of {len(points)} arms: (cos+, cos-, log s) explain "
        f"{100 * (1 - left[0] / whole):.1f} % of the variance, the form of the loss besides "
        f"{100 * (left[0] - left[1]) / whole:.1f} % (F = {ratio:.1f}, "
        f"p = {f_distribution.sf(ratio, more, freedom):.2g})."
    )


def _means(rows: Sequence[_Row], arm: str) -> tuple[float, float, float, float] | None:
    own = [row for row in rows if row["arm"] == arm]
    if not own:
        return None
    return (
        float(np.mean([unseen(row) for row in own])),
        float(np.mean([row["positive_cosine"] for row in own])),
        float(np.mean([row["negative_cosine"] for row in own])),
        float(np.log(own[0]["scale"])),
    )


def _quadratic(place: NDArray[np.float64]) -> NDArray[np.float64]:
    pairs = [place[:, i] * place[:, j] for i in range(3) for j in range(i, 3)]
    return np.column_stack([np.ones(len(place)), place, *pairs])


def _left_over(columns: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    solved = np.linalg.lstsq(columns, values, rcond=None)[0]
    return float(((values - columns @ solved) ** 2).sum())


def _swept(rows: Sequence[_Row]) -> Iterator[str]:
    yield "| arm | unseen | held out | cos+ | cos- | seeds |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name in sorted({row["arm"] for row in rows}):
        own = [row for row in rows if row["arm"] == name]
        held_out = np.mean([row[f"knn_{HELD_OUT}"] for row in own])
        mean = _means(rows, name)
        assert mean is not None
        yield (
            f"| {name} | {100 * mean[0]:.2f} | {100 * held_out:.2f} | {mean[1]:.3f} | "
            f"{mean[2]:.3f} | {len(own)} |"
        )


def _points(difference: Difference) -> str:
    text = f"{100 * difference.mean:+.2f} ± {100 * difference.half_width:.2f}"
    return f"**{text}**" if abs(difference.mean) > difference.half_width else text


if __name__ == "__main__":
    main()
