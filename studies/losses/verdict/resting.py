"""Is there anything that the form of a loss explains beyond the point where it comes to rest?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from statsmodels.regression.linear_model import OLS

from studies.losses.frozen.arms import BIASES, NAMED, SWEEP_SEEDS, Arm, sweeps
from studies.losses.instrument.paired import Difference, paired_difference
from studies.losses.verdict.contrasts import MARGIN, MIN_SEEDS
from studies.losses.verdict.evidence import UNSEEN, ByArm, Row, by_arm, mean_of, where

FORMS: Final = ("mlcd", "mlc", "cd", "per_column", "bce")
_SHAPE: Final = 10  # the columns of a quadratic of three variables
_MAX_RESTING_SCALE: Final = 32.0


@dataclass(frozen=True)
class AtRest:
    """Eq. 5 less Eq. 4 where both rest at the same positive cosine.

    cosine: the mean of Eq. 4's. seeds: those whose cosine is between those of Eq. 5's biases.
    """

    difference: Difference
    cosine: float
    seeds: int


@dataclass(frozen=True)
class Surface:
    """Accuracy over (cos+, cos-, log s), a quadratic of the arms' means.

    explained: its share of the variance. left_out: the same where each arm is predicted from all
    others. by_cosines: without s. by_form: what the form of the loss explains besides, with p.
    offsets: each form less Eq. 5 at the same place, with the half width of its interval.
    """

    num_arms: int
    explained: float
    left_out: float
    by_cosines: float
    by_form: float
    p: float
    offsets: dict[str, tuple[float, float]]


def at_rest(rows: Sequence[Row], measure: str = UNSEEN, scale: float = 16.0) -> AtRest | None:
    """Reads the accuracy of Eq. 5 off between its biases, at the cosine of Eq. 4.

    It is read off a monotone cubic (PCHIP) through the biases: straight lines would be below what
    is curved. A seed outside of their range is left out, which is stated; None below three seeds.
    """
    accuracy, cosine = by_arm(rows, measure), by_arm(rows, "positive_cosine")
    mlc = Arm("mlc", scale=scale).name
    read = _read_off(accuracy, cosine, mlc, _biased(scale))
    if len(read) < MIN_SEEDS:
        return None
    resting = float(np.mean([cosine[mlc][seed] for seed in read]))
    return AtRest(paired_difference(read, accuracy[mlc], margin=MARGIN), resting, len(read))


def reading_error(rows: Sequence[Row]) -> float:
    """Returns how far off a bias of s = 16 is read from all others, on unseen classes: the largest
    mean error of those inside of their range, and 0.0 where none can be read.
    """
    biased = _biased(Arm().scale)
    accuracy, cosine = by_arm(rows, UNSEEN), by_arm(rows, "positive_cosine")
    errors = [0.0]
    for arm in biased:
        read = _read_off(accuracy, cosine, arm, [other for other in biased if other != arm])
        if len(read) >= MIN_SEEDS:
            errors.append(float(np.mean([read[seed] - accuracy[arm][seed] for seed in read])))
    return max(map(abs, errors))


def _read_off(accuracy: ByArm, cosine: ByArm, arm: str, biased: Sequence[str]) -> dict[int, float]:
    """Returns for each seed the accuracy on the curve through `biased` at the cosine of `arm`."""
    read: dict[int, float] = {}
    for seed, there in sorted(cosine.get(arm, {}).items()):
        curve = sorted(
            (cosine[each][seed], accuracy[each][seed])
            for each in biased
            if seed in cosine.get(each, {})
        )
        places = {cosine for cosine, _ in curve}  # a curve has one accuracy at each
        if len(places) == len(biased) and min(places) <= there <= max(places):
            cosines, accuracies = zip(*curve, strict=True)
            read[seed] = float(PchipInterpolator(cosines, accuracies)(there))
    return read


def _biased(scale: float) -> list[str]:
    """Returns the arms of Eq. 5 at a scale that differ in their bias alone: at the default one
    those of all seeds.
    """
    if scale == Arm().scale:
        biases = [arm.bias for arm in NAMED.values() if arm.kind == "mlcd" and not arm.learned]
    else:
        biases = [0.0, *BIASES]
    return [Arm(scale=scale, bias=bias).name for bias in biases]


def resting_arms() -> dict[str, Arm]:
    """Returns the arms that differ in loss, scale, bias and number of labels alone.

    Those of s = 64 are left out: they do not rest, their cosines still rise when the steps end.
    """
    kept = ("margin", "clusters", "ratio", "steps", "start", "rate")
    arms = (*NAMED.values(), *sweeps())
    return {
        arm.name: arm
        for arm in arms
        if not arm.learned
        and arm.scale <= _MAX_RESTING_SCALE
        and all(getattr(arm, name) == getattr(Arm(), name) for name in kept)
    }


def comparable_arms() -> dict[str, Arm]:
    """Returns those of MLC and MLCD with as many labels: the cosines of one and of eight nearest
    centers are not on one axis.
    """
    return {
        name: arm
        for name, arm in resting_arms().items()
        if arm.kind in ("mlc", "mlcd") and arm.labels == Arm().labels
    }


def surface(rows: Sequence[Row], arms: Mapping[str, Arm]) -> Surface | None:
    """Fits the surface of one teacher's arms over the seeds of the sweeps, which all have; None
    where the arms with three seeds or more are too few.
    """
    common = [row for row in rows if row["seed"] in SWEEP_SEEDS]
    of_arm = {name: where(common, arm=name) for name in arms}
    run = {name: own for name, own in of_arm.items() if len(own) >= MIN_SEEDS}
    if len(run) <= _SHAPE + len(FORMS):
        return None
    accuracy = np.array([mean_of(own, UNSEEN) for own in run.values()])
    names = ("positive_cosine", "negative_cosine", "scale")
    place = np.array([[mean_of(own, name) for name in names] for own in run.values()])
    place[:, 2] = np.log(place[:, 2])
    place = (place - place.mean(axis=0)) / place.std(axis=0)
    kinds = [own[0]["kind"] for own in run.values()]
    present = [form for form in FORMS[1:] if form in kinds]
    forms = np.array([[kind == form for form in present] for kind in kinds], float)
    return _compared(accuracy, place, forms, present)


def _compared(
    accuracy: NDArray[np.float64],
    place: NDArray[np.float64],
    forms: NDArray[np.float64],
    present: Sequence[str],
) -> Surface:
    smooth = _quadratic(place)
    of_place = OLS(accuracy, smooth).fit()
    of_cosines = OLS(accuracy, _quadratic(place[:, :2])).fit()
    missed = of_place.get_influence().resid_press
    of_both = OLS(accuracy, np.hstack([smooth, forms])).fit()
    _, p, _ = of_both.compare_f_test(of_place)
    added = slice(smooth.shape[1], None)
    low, high = of_both.conf_int()[added].T
    offsets = zip(present, of_both.params[added], (high - low) / 2, strict=True)
    return Surface(
        len(accuracy),
        float(of_place.rsquared),
        float(1.0 - (missed**2).sum() / of_place.centered_tss),
        float(of_cosines.rsquared),
        float(of_both.rsquared - of_place.rsquared),
        float(p),
        {form: (float(mean), float(width)) for form, mean, width in offsets},
    )


def _quadratic(place: NDArray[np.float64]) -> NDArray[np.float64]:
    each = range(place.shape[1])
    pairs = [place[:, i] * place[:, j] for i, j in combinations_with_replacement(each, 2)]
    return np.column_stack([np.ones(len(place)), place, *pairs])
