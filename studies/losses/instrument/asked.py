"""The asked images: every image of a set is tested by all others of it, and keeps a bit.

Shapes: N images, D features, C classes.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.clustering.nearest import nearest_centers
from mlcd.training.evaluation.knn import TEMPERATURE, count_votes
from mlcd.training.evaluation.scores import average_precision
from mlcd.types import Embeddings

# The sets of unseen classes, which weigh alike in the headline.
ASKED: Final = ("tiny_imagenet_30", "cifar10_jpg", "caltech101_20", "fashion_products")
HELD_OUT: Final = "held_out"
_NEIGHBORS: Final = 5
_PENALTIES: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the probe, times the number of images


@dataclass(frozen=True)
class Asked:
    """A set whose every image is asked: unit rows [N, D], less the training rows' mean, and
    classes [N].
    """

    name: str
    rows: Embeddings
    classes: NDArray[np.int64]


@dataclass(frozen=True)
class AskedTags:
    """A set whose images have several tags each: unit rows [N, D] and tags, bool [N, C]."""

    name: str
    rows: Embeddings
    tags: NDArray[np.bool_]


def neighbors_right(rows: Embeddings, asked: Asked) -> NDArray[np.bool_]:
    """Returns for each image whether its five nearest others vote for its class."""
    votes = count_votes(
        rows,
        rows,
        asked.classes,
        num_classes=int(asked.classes.max()) + 1,
        neighbors=_NEIGHBORS,
        self_rows=np.arange(len(rows)),
    )
    right: NDArray[np.bool_] = votes.argmax(axis=1) == asked.classes
    return right


def tag_votes(rows: Embeddings, tags: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns [N, C]: how much the five nearest others of each image vote for each tag."""
    found = nearest_centers(rows, rows, top=_NEIGHBORS + 1)
    weights = np.exp((found.scores.astype(np.float64) - 1.0) / TEMPERATURE)
    own = found.ids == np.arange(len(rows))[:, None]
    # Where more equal rows have lower ids, the image itself is not among the nearest.
    own[~own.any(axis=1), -1] = True
    weights[own] = 0.0
    votes: NDArray[np.float64] = np.einsum("nk,nkc->nc", weights, tags[found.ids].astype(float))
    return votes


def tags_right(rows: Embeddings, asked: AskedTags) -> NDArray[np.bool_]:
    """Returns for each tag of each image whether it is among as many tags with the most votes.

    The bits are those of the image's tags, image by image, tags ascending.
    """
    votes = tag_votes(rows, asked.tags)
    places = np.argsort(np.argsort(-votes, axis=1, kind="stable"), axis=1)
    right: NDArray[np.bool_] = (places < asked.tags.sum(axis=1)[:, None])[asked.tags]
    return right


def mean_precision(rows: Embeddings, asked: AskedTags) -> float:
    """Returns the mean over tags of the average precision of the votes."""
    votes = tag_votes(rows, asked.tags)
    pairs = zip(votes.T, asked.tags.T, strict=True)
    return float(np.mean([average_precision(ranking, positive) for ranking, positive in pairs]))


def probe(rows: Embeddings, classes: NDArray[np.int64]) -> float:
    """Returns the leave-one-out accuracy of ridge regression on one-hot classes, at the best of
    five penalties.

    The prediction for an image that the regression did not see is (y^ - h y) / (1 - h), h its
    leverage.
    """
    centered = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    targets = np.eye(int(classes.max()) + 1)[classes]
    shares = targets.mean(axis=0)
    targets -= shares
    values, directions = np.linalg.eigh(centered.T @ centered)
    along = centered @ directions
    found = []
    for penalty in _PENALTIES:
        shrunk = along / (np.maximum(values, 0) + penalty * len(rows))
        leverage = (shrunk * along).sum(axis=1)[:, None] + 1 / len(rows)
        fitted = shrunk @ (along.T @ targets)
        unseen = (fitted - leverage * targets) / (1 - leverage)
        found.append(float(((unseen + shares).argmax(axis=1) == classes).mean()))
    return max(found)
