"""Random numbers as pure functions of counters: the same on every machine, rank, resume and batch size."""

import numpy as np
from numpy.typing import NDArray

# SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def hash_counters(*counters: int | NDArray[np.integer]) -> NDArray[np.uint64]:
    """A uint64 for each broadcast tuple of integer counters; order matters, e.g. (seed, step, class id)."""
    with np.errstate(over="ignore"):
        state = np.zeros(1, dtype=np.uint64)
        for counter in counters:
            state = _mix(state ^ np.asarray(counter).astype(np.int64).astype(np.uint64))
    return state


def uniform(*counters: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """Uniform in [0, 1) with 53 random bits, a pure function of the counters."""
    return (hash_counters(*counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(num: int, *counters: int) -> NDArray[np.int64]:
    """A permutation of range(num), a pure function of the counters."""
    return np.argsort(hash_counters(*counters, np.arange(num)), kind="stable")
