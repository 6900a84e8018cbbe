"""Retrieval of images by captions and of captions by images, where images have several captions.

Image to text is right if any of the image's captions is among the first K (the hit rate of
Karpathy's splits); text to image is right if the caption's image is among the first K. Ties count
as nearer than the right result, so that equal rows never help.
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
_CELLS: Final = 1 << 24  # cosines in memory at a time


@dataclass(frozen=True)
class Ranks:
    """The ranks of the right results, from 0.

    of_image: [N], rank of an image's best caption among the captions of other images. of_caption:
    [M], rank of a caption's image among all images.
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
    """Returns the ranks, computed in blocks of images with all captions.

    image_of: [M], index of each caption's image, ascending; every image has a caption. cells:
    cosines per block.
    """
    # Sums in float64, rounded to float32, are exact enough that equal rows get equal cosines.
    images_ND, captions_MD = images.astype(np.float64), captions.astype(np.float64)
    right_M = np.einsum("md,md->m", images_ND[image_of], captions_MD).astype(np.float32)
    best_N = np.full(len(images), -np.inf, dtype=np.float32)
    np.maximum.at(best_N, image_of, right_M)
    of_image = np.empty(len(images), dtype=np.int64)
    of_caption = np.zeros(len(captions), dtype=np.int64)
    rows = max(1, cells // len(captions))
    for start in range(0, len(images), rows):
        stop = min(start + rows, len(images))
        cosines = (images_ND[start:stop] @ captions_MD.T).astype(np.float32)
        first, last = np.searchsorted(image_of, [start, stop])
        cosines[image_of[first:last] - start, np.arange(first, last)] = -np.inf
        of_image[start:stop] = np.count_nonzero(cosines >= best_N[start:stop, None], axis=1)
        of_caption += np.count_nonzero(cosines >= right_M, axis=0)
    return Ranks(of_image, of_caption)


def retrieval_figures(ranks: Ranks, image_of: NDArray[np.int64]) -> Figures:
    """Returns R@1, R@5 and R@10 in both directions, with intervals over images and their captions.

    image_of: [M], index of each caption's image.
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
