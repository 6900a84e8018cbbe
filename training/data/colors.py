"""Draws changes of color from (seed, position in the stream, view), on the CPU for any device."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import Stream, uniform
from mlcd.training.data.augment_config import AugmentConfig

JITTERS: Final = ("brightness", "contrast", "saturation", "hue")
# Random draws for a view: one decides on jitter; four give the order and four the factors of
# JITTERS; one each decides on gray, blur and solarize; one gives the blur's sigma.
_DRAWS: Final = 1 + 2 * len(JITTERS) + 4


@dataclass(frozen=True)
class Colors:
    """The changes of color of n views.

    jittered, gray, blurred, solarized: bool [n], whether the change applies. order: int64 [n, 4],
    indices into JITTERS in the order in which they apply. factors: float64 [n, 4], by JITTERS:
    multiples, and the turn of the hue. sigma: float64 [n], standard deviation of the blur. jitters:
    names of the changes with a strength above 0.
    """

    jittered: NDArray[np.bool_]
    order: NDArray[np.int64]
    factors: NDArray[np.float64]
    gray: NDArray[np.bool_]
    blurred: NDArray[np.bool_]
    sigma: NDArray[np.float64]
    solarized: NDArray[np.bool_]
    jitters: tuple[str, ...]


def draw_colors(
    positions: NDArray[np.int64], config: AugmentConfig, seed: int, view: int = 0
) -> Colors | None:
    """Draws the changes of the views at these positions, distributed like torchvision's ColorJitter
    (applied to the share `jitter`), RandomGrayscale, GaussianBlur and RandomSolarize.

    Returns None if the config changes no colors of this view.
    """
    strengths = config.jitters
    jitters = tuple(name for name in JITTERS if strengths[name] and config.jitter)
    blur, solarize = config.share_of("blur", view), config.share_of("solarize", view)
    if not (jitters or config.grayscale or blur or solarize):
        return None
    counters = np.arange(view * _DRAWS, (view + 1) * _DRAWS)
    draws = uniform(seed, Stream.COLORS, positions[:, None], counters)
    num = len(JITTERS)
    jittered, gray, blurred, solarized, sigma = draws[:, [0, -4, -3, -2, -1]].T
    strength = np.array([strengths[name] for name in JITTERS])
    middle = np.array([1.0, 1.0, 1.0, 0.0])
    low = np.maximum(middle - strength, np.array([0.0, 0.0, 0.0, -0.5]))
    factors = low + (middle + strength - low) * draws[:, 1 + num : 1 + 2 * num]
    smallest, largest = config.blur_sigma
    return Colors(
        jittered=jittered < config.jitter,
        order=np.argsort(draws[:, 1 : 1 + num], axis=1),
        factors=factors,
        gray=gray < config.grayscale,
        blurred=blurred < blur,
        sigma=smallest + (largest - smallest) * sigma,
        solarized=solarized < solarize,
        jitters=jitters,
    )
