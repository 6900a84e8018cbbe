"""When do several labels help? MLCD less CD by the number of objects in a picture, and covariates.

Shapes: N differences, C covariates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ttest_1samp
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.outliers_influence import variance_inflation_factor
from statsmodels.tools import add_constant

from studies.losses.mosaics.arms import MOSAIC_ARMS
from studies.losses.mosaics.tiles import OBJECTS
from studies.losses.verdict.contrasts import Contrast, Finding, findings
from studies.losses.verdict.evidence import Row, by_arm, value_of, where

COVARIATES: Final = ("purity", "conflict", "log2 objects", "log2 k")
_NAMES: Final = {name: arm.name for name, arm in MOSAIC_ARMS.items()}
MOSAIC_CONTRASTS: Final = tuple(
    Contrast(f"{arm} - {other}", _NAMES[arm], _NAMES[other])
    for arm, other in (
        ("MLCD", "CD"), ("MLCD(4)", "CD"), ("MLCD(1)", "CD"), ("MLC", "CD"), ("MLCD", "MLC"),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Effect:
    """A coefficient with the half width of its 95 % interval.

    inflation: of its variance, because of the other covariates; 1 where they do not vary with it.
    """

    mean: float
    half_width: float
    inflation: float = 1.0


def by_objects(rows: Sequence[Row], measure: str) -> dict[int, list[Finding]]:
    """Returns the contrasts of each number of objects, of one teacher.

    measure: as in `evidence`, or `tiles`, pictures of as many objects as those trained on.
    """
    return {
        objects: findings(
            by_arm(where(rows, objects=objects), _measure(measure, objects)), MOSAIC_CONTRASTS
        )
        for objects in OBJECTS
    }


def trend(rows: Sequence[Row], measure: str) -> Effect | None:
    """Returns how much MLCD less CD grows with every doubling of the number of objects."""
    gains = _gains(rows, measure, clusters=MOSAIC_ARMS["CD"].clusters)
    slopes = []
    for seed in sorted({seed for seed, _ in gains}):
        own = [gains.get((seed, objects)) for objects in OBJECTS]
        if all(each is not None for each in own):
            slopes.append(float(np.polyfit(np.log2(OBJECTS), np.array(own, float), 1)[0]))
    if len(slopes) < 3:
        return None
    low, high = ttest_1samp(slopes, 0.0).confidence_interval()
    return Effect(float(np.mean(slopes)), float(high - low) / 2)


def covariate_effects(rows: Sequence[Row], measure: str) -> dict[str, Effect] | None:
    """Returns what a standard deviation of each covariate adds to MLCD less CD, all together.

    Least squares over seeds, objects and numbers of clusters; None below 12 differences or three
    seeds. What a seed's differences share widens the intervals.
    """
    gains, places, seeds = [], [], []
    for clusters in sorted({row["clusters"] for row in rows}):
        several = {
            (row["seed"], row["objects"]): row for row in where(rows, kind="mlcd", labels=8)
            if row["clusters"] == clusters
        }  # fmt: skip
        for key, gain in sorted(_gains(rows, measure, clusters=clusters).items()):
            row = several[key]
            gains.append(gain)
            sizes = (float(np.log2(size)) for size in (row["objects"], clusters))
            places.append([row["purity"], row["conflict"], *sizes])
            seeds.append(row["seed"])
    if len(gains) < 12 or len(set(seeds)) < 3:
        return None
    return least_squares(np.array(places), np.array(gains), np.array(seeds), COVARIATES)


def least_squares(
    places_NC: NDArray[np.float64],
    values_N: NDArray[np.float64],
    seeds_N: NDArray[np.int64],
    names: Sequence[str],
) -> dict[str, Effect]:
    """Returns the coefficients of standardized covariates; one that never varies has none.

    Intervals are of errors that are alike within a seed (cluster-robust, t of seeds - 1).
    """
    deviations = places_NC.std(axis=0)
    varied = deviations > 1e-12
    scaled = (places_NC - places_NC.mean(axis=0))[:, varied] / deviations[varied]
    groups = np.unique(seeds_N, return_inverse=True)[1]
    fitted = OLS(values_N, add_constant(scaled)).fit(
        cov_type="cluster", cov_kwds={"groups": groups}, use_t=True
    )
    low, high = fitted.conf_int()[1:].T
    kept = [name for name, each in zip(names, varied, strict=True) if each]
    columns = fitted.model.exog
    inflated = (variance_inflation_factor(columns, 1 + place) for place in range(len(kept)))
    found = zip(kept, fitted.params[1:], (high - low) / 2, inflated, strict=True)
    return {name: Effect(*map(float, effect)) for name, *effect in found}


def _gains(rows: Sequence[Row], measure: str, clusters: int) -> Mapping[tuple[int, int], float]:
    """Returns MLCD less CD by seed and number of objects."""
    of_kind = []
    for kind, labels in (("mlcd", 8), ("cd", 1)):
        own = where(rows, kind=kind, labels=labels, clusters=clusters)
        of_kind.append(
            {
                (row["seed"], row["objects"]): value_of(row, _measure(measure, row["objects"]))
                for row in own
            }
        )
    several, one = of_kind
    return {key: several[key] - one[key] for key in several.keys() & one.keys()}


def _measure(measure: str, objects: int) -> str:
    return f"tiles_{objects}" if measure == "tiles" else measure
