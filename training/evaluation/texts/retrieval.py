"""Retrieval of images by captions and of captions by images, where images have several captions.

An image is found by its captions if any of them is among the first K (the hit rate of Karpathy's
splits), a caption finds its image if that is among the first K. What is as near as the right one
counts as nearer, so that equal rows never help.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.training.evaluation.intervals import Interval, bootstrap
from mlcd.training.evaluation.texts.zero_shot import Figures
from mlcd.types import Embeddings

CUTOFFS: Final = (1, 5, 10)
_CELLS: Final = 1 << 24  # cosines in memory at one time


@dataclass(frozen=True)
class Ranks:
    """The places of the right ones, from 0.

    of_image: [N], the place of an image's best caption among all captions but its own others.
    of_caption: [M], the place of a caption's image among all images.
    """

    of_image: NDArray[np.int64]
    of_caption: NDArray[np.int64]


def retrieval_ranks(
    images: Embeddings,
    captions: Embeddings,
    image_of: NDArray[np.int64],
    *,
    cells: int = _CELLS,
) -> Ranks:
    """Returns the ranks, from the cosines of a few images at a time with all captions.

    image_of: [M], the image of each caption, ascending; every image has one. cells: the size of
    that block.
    """
    # Equal rows have equal cosines only if the sums are exact; float64 rounded to float32 is.
    images_ND, captions_MD = images.astype(np.float64), captions.astype(np.float64)
    own_M = np.einsum("md,md->m", images_ND[image_of], captions_MD).astype(np.float32)
    best_N = np.full(len(images), -np.inf, dtype=np.float32)
    np.maximum.at(best_N, image_of, own_M)
    of_image = np.empty(len(images), dtype=np.int64)
    of_caption = np.zeros(len(captions), dtype=np.int64)
    rows = max(1, cells // len(captions))
    for start in range(0, len(images), rows):
        stop = min(start + rows, len(images))
        cosines = (images_ND[start:stop] @ captions_MD.T).astype(np.float32)
        first, last = np.searchsorted(image_of, [start, stop])
        cosines[image_of[first:last] - start, np.arange(first, last)] = -np.inf
        of_image[start:stop] = np.count_nonzero(cosines >= best_N[start:stop, None], axis=1)
        of_caption += np.count_nonzero(cosines >= own_M, axis=0)
    return Ranks(of_image, of_caption)


def retrieval_figures(ranks: Ranks, image_of: NDArray[np.int64]) -> Figures:
    """Returns R@1, R@5 and R@10 both ways. Intervals are over images, each with all its captions.

    image_of: [M], the image of each caption.
    """
    num_images = len(ranks.of_image)
    counts = np.bincount(image_of, minlength=num_images)
    metrics: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    for cutoff in CUTOFFS:
        caption_found = ranks.of_caption < cutoff
        hits = np.bincount(image_of, weights=caption_found, minlength=num_images)
        for name, right, queries in (
            (f"image_to_text_r@{cutoff}", ranks.of_image < cutoff, np.ones(num_images)),
            (f"text_to_image_r@{cutoff}", hits, counts),
        ):
            share = partial(_share, right, queries)
            metrics[name] = share(np.arange(num_images))
            intervals[name] = bootstrap(share, num_images)
    return Figures(metrics, intervals)


def _share(right: NDArray[Any], queries: NDArray[Any], chosen: NDArray[np.int64]) -> float:
    return float(right[chosen].sum() / queries[chosen].sum())
