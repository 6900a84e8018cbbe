"""Which samples make up a step: a stateless function, so that resume is one integer."""

import numpy as np
from numpy.typing import NDArray

from mlcd.randomness import permutation


def batch_positions(step: int, batch_size: int) -> NDArray[np.int64]:
    """Positions of a step's samples in the endless stream of epochs."""
    return np.arange(step * batch_size, (step + 1) * batch_size)


def sample_rows(positions: NDArray[np.int64], num_samples: int, seed: int) -> NDArray[np.int64]:
    """The dataset row at each position; every epoch is a permutation of its own."""
    epochs, offsets = np.divmod(positions, num_samples)
    rows = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = permutation(num_samples, seed, int(epoch))[offsets[here]]
    return rows
