"""The samples of each step, as stateless functions of the position in an endless stream.

So the step is all that resuming needs. The order depends only on the data sets' sizes, their
weights and the seed, not on batch size or the numbers of processes and workers.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid
from mlcd.randomness import Stream, permute_positions

# A mixture's shares are exact in every block of this many positions.
BLOCK: Final = 4096


def step_positions(step: int, batch_size: int) -> NDArray[np.int64]:
    """Returns the stream positions of a step's samples, over all processes."""
    return np.arange(step * batch_size, (step + 1) * batch_size)


def step_shares(
    step: int, batch_size: int, num_parts: int, rank: int, size: int
) -> Iterator[NDArray[np.int64]]:
    """Yields the positions of a process's share of each of a step's `num_parts` micro-batches."""
    positions = step_positions(step, batch_size)
    for part in range(num_parts):
        micro_batch = positions[own_part(len(positions), part, num_parts)]
        yield micro_batch[own_part(len(micro_batch), rank, size)]


def own_part(num: int, rank: int, size: int) -> slice:
    """Returns the rank's contiguous share of `num`; the first num % size ranks get one more."""
    share, more = divmod(num, size)
    start = share * rank + min(rank, more)
    return slice(start, start + share + (rank < more))


def locate(
    positions: NDArray[np.int64], sizes: Sequence[int], weights: Sequence[float], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the part and the row at each position, [n] each.

    Each part has its own epochs; each epoch is a permutation of the part's rows.
    """
    parts, indices = part_indices(positions, weights, seed)
    rows = np.empty_like(positions)
    for part, size in enumerate(sizes):
        in_part = np.flatnonzero(parts == part)
        epochs, offsets = np.divmod(indices[in_part], size)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            rows[in_part[in_epoch]] = permute_positions(
                offsets[in_epoch], size, seed, Stream.EPOCHS, part, int(epoch)
            )
    return parts, rows


def part_indices(
    positions: NDArray[np.int64], weights: Sequence[float], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns, for each position, its part and the number of earlier positions of the same part,
    [n] each.
    """
    if len(weights) == 1:
        return np.zeros_like(positions), positions.copy()
    shares = block_shares(weights)
    ends = np.cumsum(shares)
    blocks, slots = np.divmod(positions, BLOCK)
    parts, indices = np.empty_like(positions), np.empty_like(positions)
    for block in np.unique(blocks):
        in_block = blocks == block
        drawn = permute_positions(np.arange(BLOCK), BLOCK, seed, Stream.MIXTURE, int(block))
        part_of_slot = np.searchsorted(ends, drawn, side="right")
        num_before = np.empty(BLOCK, dtype=np.int64)
        for part, share in enumerate(shares):
            num_before[part_of_slot == part] = np.arange(share)
        parts[in_block] = part_of_slot[slots[in_block]]
        indices[in_block] = block * shares[parts[in_block]] + num_before[slots[in_block]]
    return parts, indices


def part_counts(position: int, weights: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Returns the number of samples of each part before a position, [parts]."""
    in_block_before = np.arange(position // BLOCK * BLOCK, position)
    parts, _ = part_indices(in_block_before, weights, seed)
    counts: NDArray[np.int64] = position // BLOCK * block_shares(weights)
    np.add.at(counts, parts, 1)
    return counts


def block_shares(weights: Sequence[float]) -> NDArray[np.int64]:
    """Returns each part's number of positions in a block, [parts]; they sum to BLOCK.

    Shares are rounded by the largest-remainder method. Raises ConfigInvalid if a weight is too
    small for one position.
    """
    exact = np.asarray(weights, dtype=np.float64)
    exact = exact / exact.sum() * BLOCK
    shares: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(shares - exact, kind="stable")
    shares[by_remainder[: BLOCK - shares.sum()]] += 1
    if not shares.all():
        smallest = int(np.argmin(exact))
        raise ConfigInvalid(
            f"data.mix.{smallest}.weight must be at least 1/{BLOCK} of the sum of all weights, got "
            f"{weights[smallest]:g}",
            remedy="raise it, or leave this data set out",
        )
    return shares
