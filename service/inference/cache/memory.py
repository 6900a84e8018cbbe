"""The cache in this process, which evicts the least recently used vectors."""

from collections import OrderedDict
from typing import Final

from mlcd.service.telemetry.metrics import Metrics

# Bytes per entry in addition to the vector: key, two object headers and the slot in the table
# (measured: 173 to 212).
_ENTRY_BYTES: Final = 256


class MemoryCache:
    """A cache of at most `max_bytes`, including keys and bookkeeping; 0 disables it.

    Use it from one event loop.
    """

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self._max_bytes, self._metrics = max_bytes, metrics
        self._vectors: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: bytes) -> bytes | None:
        if key in self._vectors:
            self._vectors.move_to_end(key)
        return self._vectors.get(key)

    def put(self, key: bytes, packed: bytes) -> None:
        if _size(packed) > self._max_bytes or key in self._vectors:
            return
        self._vectors[key] = packed
        self._num_bytes += _size(packed)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._vectors.popitem(last=False)
            self._num_bytes -= _size(oldest)
        self._metrics.cache_holds(self._num_bytes)


def _size(packed: bytes) -> int:
    return len(packed) + _ENTRY_BYTES
