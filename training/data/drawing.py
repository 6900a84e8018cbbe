"""Each time an image is seen, draws `num` labels at random from its L stored nearest centers."""

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import Stream, uniform


def draw_labels(
    stored: NDArray[np.int32], positions: NDArray[np.int64], num: int, seed: int
) -> NDArray[np.int32]:
    """Draws `num` of each row's labels uniformly without replacement; returns [n, num], best first.

    stored: int32 [n, L], L >= num, best first; -1 for none, which is drawn only if a row has fewer
    than `num` labels. positions: int64 [n], in the stream of samples; the draw depends only on them
    and the seed. If num is L, `stored` itself is returned.
    """
    columns = draw_columns(stored, positions, num, seed)
    return stored if columns is None else np.take_along_axis(stored, columns, axis=1)


def draw_columns(
    stored: NDArray[np.int32], positions: NDArray[np.int64], num: int, seed: int
) -> NDArray[np.int64] | None:
    """Returns the columns that `draw_labels` draws, int64 [n, num]; None if num is L."""
    length = stored.shape[1]
    if length == num:
        return None
    # The columns with the smallest keys are drawn.
    draw_keys = uniform(seed, Stream.LABELS, positions[:, None], np.arange(length))
    draw_keys[stored < 0] = 1.0
    return np.sort(np.argpartition(draw_keys, num - 1, axis=1)[:, :num], axis=1)


def label_weights(scores: NDArray[np.floating], labels: NDArray[np.int32]) -> NDArray[np.float32]:
    """Returns label weights [n, L]: each score divided by the mean score of its row's labels.

    Negative scores count as 0. In a row without a positive score all labels have weight 1. scores,
    labels: [n, L]; a label of -1 has weight 0.
    """
    is_label = labels >= 0
    clipped_scores = np.where(is_label, np.maximum(scores.astype(np.float32), 0.0), 0.0)
    totals = clipped_scores.sum(axis=1, keepdims=True)
    num_labels = is_label.sum(axis=1, keepdims=True)
    has_no_positive_score = totals == 0.0
    weights: NDArray[np.float32] = np.where(
        has_no_positive_score,
        is_label,
        clipped_scores * (num_labels / np.where(has_no_positive_score, 1.0, totals)),
    ).astype(np.float32)
    return weights
