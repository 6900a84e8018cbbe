"""Random numbers as pure functions of counters: the same on every machine, rank, resume and batch
size.
"""

import math
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

# SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# 4 rounds pass any statistical test of few positions; hashing is cheap
_FEISTEL_ROUNDS: Final = 8


class Stream(IntEnum):
    """The uses of a run's seed. Each is the counter after the seed, so no two draw the same
    numbers.
    """

    CROPS = 1
    EPOCHS = 2
    NEGATIVES = 3
    LABELS = 4
    MIXTURE = 5
    TOWER = 7
    CENTERS = 8
    DROP_PATH = 9
    COLORS = 10
    TEXT_TOWER = 11
    CAPTIONS = 12


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def hash_counters(*counters: int | NDArray[np.integer]) -> NDArray[np.uint64]:
    """Returns a uint64 for each broadcast tuple of integer counters; order matters, e.g. (seed,
    step, class id).
    """
    with np.errstate(over="ignore"):
        state = np.zeros(1, dtype=np.uint64)
        for counter in counters:
            state = _mix(state ^ np.asarray(counter).astype(np.int64).astype(np.uint64))
    return state


def uniform(*counters: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """Returns uniform numbers in [0, 1) with 53 random bits, a pure function of the counters."""
    return (hash_counters(*counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(num: int, *counters: int) -> NDArray[np.int64]:
    """Returns a permutation of range(num), a pure function of the counters."""
    return np.argsort(hash_counters(*counters, np.arange(num)), kind="stable")


def permute_positions(
    positions: NDArray[np.integer], num: int, *counters: int
) -> NDArray[np.int64]:
    """Returns the image of each position (in 0..num-1) under a permutation of range(num), a pure
    function of the counters.

    Unlike `permutation`, it computes only the requested positions. It is a Feistel
    network over two digits whose bases multiply to little more than num (Black and Rogaway: Ciphers
    with Arbitrary Finite Domains, CT-RSA 2002). A value of num or more is permuted again until it
    is below num.
    """
    # The left digit has ceil(sqrt(num)) values, the right one as many as are needed to reach num.
    left_base = math.isqrt(max(num - 1, 0)) + 1
    right_base = -(-num // left_base)
    keys = hash_counters(*counters, np.arange(_FEISTEL_ROUNDS))
    reached = _feistel(positions.astype(np.int64), left_base, right_base, keys)
    while (outside := reached >= num).any():
        reached[outside] = _feistel(reached[outside], left_base, right_base, keys)
    return reached


def _feistel(
    x: NDArray[np.int64], left_base: int, right_base: int, keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Permutes range(left_base * right_base)."""
    left_digits, right_digits = np.divmod(x, right_base)
    with np.errstate(over="ignore"):
        for key in keys.reshape(-1, 2):
            left_digits = (left_digits + _below(left_base, key[0], right_digits)) % left_base
            right_digits = (right_digits + _below(right_base, key[1], left_digits)) % right_base
    return left_digits * right_base + right_digits


def _below(base: int, key: np.uint64, digit: NDArray[np.int64]) -> NDArray[np.int64]:
    # The remainder's bias is below base / 2^64.
    return (_mix(key ^ digit.astype(np.uint64)) % np.uint64(base)).astype(np.int64)
