"""Labels drawn anew each time an image is seen, out of more of its nearest centers."""

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import Stream, uniform


def draw_labels(
    stored: NDArray[np.int32], positions: NDArray[np.int64], num: int, seed: int
) -> NDArray[np.int32]:
    """`num` of each row's labels, uniformly without repetition, their order kept, [n, num]; `stored` where num is L.

    stored: int32 [n, L >= num], best first, -1 for none, which is taken only where nothing else is left. positions:
    int64 [n], in the stream of samples: what is drawn depends on them and the seed only.
    """
    length = stored.shape[1]
    if length == num:
        return stored
    chances = uniform(seed, Stream.LABELS, positions[:, None], np.arange(length))
    chances[stored < 0] = 1.0
    drawn = np.sort(np.argpartition(chances, num - 1, axis=1)[:, :num], axis=1)
    return np.take_along_axis(stored, drawn, axis=1)
