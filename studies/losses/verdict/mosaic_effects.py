"""When do several labels help? MLCD less CD by the number of objects in a picture, and covariates.

Shapes: N differences, C covariates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from studies.losses.mosaics.arms import MOSAIC_ARMS
from studies.losses.mosaics.tiles import OBJECTS
from studies.losses.verdict.contrasts import Contrast, Finding, findings
from studies.losses.verdict.evidence import Row, by_arm, value_of, where

COVARIATES: Final = ("purity", "conflict", "log2 objects")
_NAMES: Final = {name: arm.name for name, arm in MOSAIC_ARMS.items()}
MOSAIC_CONTRASTS: Final = tuple(
    Contrast(f"{arm} - {other}", _NAMES[arm], _NAMES[other])
    for arm, other in (
        ("MLCD", "CD"), ("MLCD(4)", "CD"), ("MLCD(1)", "CD"), ("MLC", "CD"), ("MLCD", "MLC"),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Effect:
    """A coefficient with the half width of its 95 % interval."""

    mean: float
    half_width: float


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
    error = float(np.std(slopes, ddof=1)) / len(slopes) ** 0.5
    return Effect(float(np.mean(slopes)), float(t.ppf(0.975, len(slopes) - 1)) * error)


def covariate_effects(rows: Sequence[Row], measure: str) -> dict[str, Effect] | None:
    """Returns what a standard deviation of each covariate adds to MLCD less CD, all together.

    Ordinary least squares over seeds, objects and numbers of clusters; None below 12 differences.
    """
    gains, places = [], []
    for clusters in sorted({row["clusters"] for row in rows}):
        several = {
            (row["seed"], row["objects"]): row for row in where(rows, kind="mlcd", labels=8)
            if row["clusters"] == clusters
        }  # fmt: skip
        for key, gain in sorted(_gains(rows, measure, clusters=clusters).items()):
            row = several[key]
            gains.append(gain)
            places.append([row["purity"], row["conflict"], float(np.log2(row["objects"]))])
    if len(gains) < 12:
        return None
    return least_squares(np.array(places), np.array(gains), COVARIATES)


def least_squares(
    places_NC: NDArray[np.float64], values_N: NDArray[np.float64], names: Sequence[str]
) -> dict[str, Effect]:
    """Returns the coefficients of standardized covariates; one that never varies has none."""
    deviations = places_NC.std(axis=0)
    varied = deviations > 1e-12
    scaled = (places_NC - places_NC.mean(axis=0))[:, varied] / deviations[varied]
    columns = np.column_stack([np.ones(len(scaled)), scaled])
    solved, *_ = np.linalg.lstsq(columns, values_N, rcond=None)
    freedom = len(values_N) - columns.shape[1]
    variance = float(((values_N - columns @ solved) ** 2).sum()) / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.pinv(columns.T @ columns)))
    width = float(t.ppf(0.975, freedom))
    kept = [name for name, each in zip(names, varied, strict=True) if each]
    return {
        name: Effect(float(mean), width * float(error))
        for name, mean, error in zip(kept, solved[1:], errors[1:], strict=True)
    }


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
