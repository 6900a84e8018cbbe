"""Intervals that also cover the choice of test images: a bootstrap over images and seeds.

Shapes: S seeds, N images, R draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from studies.losses.verdict.evidence import SET_SIZES, Row, right_bits, unseen_sets

_DRAWS: Final = 1000
_AT_ONCE: Final = 100  # draws, so that little memory is taken


@dataclass(frozen=True)
class OverImages:
    """A difference with its 95 % interval over images and seeds.

    disagreement: the share of images that just one of both arms has right, of one seed.
    """

    mean: float
    low: float
    high: float
    disagreement: float


def over_images(
    rows: Sequence[Row], others: Sequence[Row], sizes: Mapping[str, int] = SET_SIZES
) -> OverImages:
    """Compares arms on their common seeds; images are drawn within each set, for all seeds alike.

    Seeds and images are drawn anew together, which is a little wide (Owen, 2007: the pigeonhole
    bootstrap).
    """
    ours, theirs = ({row["seed"]: row for row in each} for each in (rows, others))
    seeds = sorted(ours.keys() & theirs.keys())
    right, wrong = (right_bits([each[seed] for seed in seeds], sizes) for each in (ours, theirs))
    names = unseen_sets(rows[0])
    apart = {name: right[name].astype(np.float32) - wrong[name] for name in names}
    drawn = _drawn(list(apart.values()), len(seeds))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return OverImages(
        float(np.mean([each.mean() for each in apart.values()])),
        float(low),
        float(high),
        float(np.mean([np.abs(each).mean() for each in apart.values()])),
    )


def _drawn(apart: Sequence[NDArray[np.float32]], num_seeds: int) -> NDArray[np.float64]:
    """Returns the mean over sets of the difference in each draw, [R]."""
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(_DRAWS // _AT_ONCE):
        seeds_RS = rng.multinomial(num_seeds, [1 / num_seeds] * num_seeds, _AT_ONCE) / num_seeds
        total = np.zeros(_AT_ONCE)
        for each_SN in apart:
            num = each_SN.shape[1]
            chosen_RN = rng.multinomial(num, np.full(num, 1 / num), _AT_ONCE).astype(np.float32)
            total += (seeds_RS * (chosen_RN @ each_SN.T)).sum(axis=1) / num
        parts.append(total / len(apart))
    return np.concatenate(parts)
