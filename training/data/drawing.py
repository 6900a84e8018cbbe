"""Labels drawn anew each time an image is seen, from more of its nearest centers than are used."""

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import Stream, uniform


def draw_labels(
    stored: NDArray[np.int32], positions: NDArray[np.int64], num: int, seed: int
) -> NDArray[np.int32]:
    """Draws `num` of each row's labels, uniformly without repetition; returns [n, num], order kept.

    `stored` itself is returned if num is L. stored: int32 [n, L >= num], best first; -1 for none,
    which is taken only when no other label is left. positions: int64 [n], in the stream of samples;
    the draw depends on them and the seed only.
    """
    columns = draw_columns(stored, positions, num, seed)
    return stored if columns is None else np.take_along_axis(stored, columns, axis=1)


def draw_columns(
    stored: NDArray[np.int32], positions: NDArray[np.int64], num: int, seed: int
) -> NDArray[np.int64] | None:
    """Returns the columns that `draw_labels` takes, [n, num]; None if it takes all."""
    length = stored.shape[1]
    if length == num:
        return None
    chances = uniform(seed, Stream.LABELS, positions[:, None], np.arange(length))
    chances[stored < 0] = 1.0
    return np.sort(np.argpartition(chances, num - 1, axis=1)[:, :num], axis=1)


def label_weights(scores: NDArray[np.floating], labels: NDArray[np.int32]) -> NDArray[np.float32]:
    """Returns how much each label counts: as its score, relative to the mean of its row's labels.

    A negative score counts as 0. A row without a positive score has weights of 1. scores and
    labels: [n, L]; where the label is -1, the weight is 0.
    """
    present = labels >= 0
    counted = np.where(present, np.maximum(scores.astype(np.float32), 0.0), 0.0)
    totals = counted.sum(axis=1, keepdims=True)
    number = present.sum(axis=1, keepdims=True)
    even = totals == 0.0
    weights: NDArray[np.float32] = np.where(
        even, present, counted * (number / np.where(even, 1.0, totals))
    ).astype(np.float32)
    return weights
