"""Intervals that also cover the choice of test images, from the bits that each row keeps.

Shapes: S seeds, N images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from studies.losses.verdict.evidence import SET_SIZES, Row, right_bits, unseen_sets

_LEVEL: Final = 0.95


@dataclass(frozen=True)
class OverImages:
    """A difference with its 95 % interval over images and seeds.

    disagreement: the share of images that just one of both arms has right, of one seed.
    """

    mean: float
    half_width: float
    disagreement: float


def over_images(
    rows: Sequence[Row], others: Sequence[Row], sizes: Mapping[str, int] = SET_SIZES
) -> OverImages:
    """Compares arms on their common seeds, two at least, as if images were drawn within each set.

    The variance is that over seeds and that over images together; what chance does to one image in
    one seed is in both, so that the interval is a little wide (Owen, 2007).
    """
    ours, theirs = ({row["seed"]: row for row in each} for each in (rows, others))
    seeds = sorted(ours.keys() & theirs.keys())
    ours_right, theirs_right = (
        right_bits([each[seed] for seed in seeds], sizes) for each in (ours, theirs)
    )
    names = unseen_sets(rows[0])
    apart = [ours_right[name].astype(np.float32) - theirs_right[name] for name in names]
    variance = _over_seeds(apart) + _over_images(apart)
    return OverImages(
        float(np.mean([each_SN.mean() for each_SN in apart])),
        float(t.ppf((1 + _LEVEL) / 2, len(seeds) - 1) * variance**0.5),
        float(np.mean([np.abs(each_SN).mean() for each_SN in apart])),
    )


def _over_seeds(apart: Sequence[NDArray[np.float32]]) -> float:
    """Returns the variance of the mean over sets that comes of the seeds."""
    of_seed_S = np.mean([each_SN.mean(axis=1) for each_SN in apart], axis=0)
    return float(of_seed_S.var(ddof=1)) / len(of_seed_S)


def _over_images(apart: Sequence[NDArray[np.float32]]) -> float:
    """Returns the variance of the mean over sets that comes of the images of each."""
    of_image = [each_SN.mean(axis=0) for each_SN in apart]
    return float(sum(each_N.var(ddof=1) / len(each_N) for each_N in of_image)) / len(apart) ** 2
