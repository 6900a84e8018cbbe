"""Images that are read before they are asked for."""

import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from mlcd.images.entries import Entry
from mlcd.types import SampleKey

# what waits for an image's bytes, whose reading has begun
Wait: TypeAlias = Callable[[], bytes]
_MOST_IMAGES: Final = 4096
_AT_ONCE: Final = 256  # images that begin with one that is taken, so that this takes no time
_MOST_BYTES: Final = 64 << 20  # by the sizes that the listing tells


class ReadAhead:
    """The images that are on their way, in the order in which they will be asked for.

    begun: yields them; to take one from it begins its reading. is_full: tells that no more may
    begin, though nothing here is at its limit.
    """

    def __init__(
        self, begun: Iterator[tuple[Entry, Wait]], is_full: Callable[[], bool] = lambda: False
    ) -> None:
        self._begun, self._is_full = begun, is_full
        self._lock = threading.Lock()
        self._waiting: dict[SampleKey, tuple[int, Wait]] = {}
        self._num_bytes = 0

    def take(self, entry: Entry) -> Wait | None:
        """Returns what waits for an image, and begins others; None for one that nobody announced.

        Several threads may call it.
        """
        with self._lock:
            while entry.key not in self._waiting:
                if len(self._waiting) >= _MOST_IMAGES or not self._begin():
                    return None
            size_bytes, wait = self._waiting.pop(entry.key)
            self._num_bytes -= size_bytes
            for _ in range(_AT_ONCE):
                if not (self._has_room() and self._begin()):
                    break
            return wait

    def _has_room(self) -> bool:
        return (
            len(self._waiting) < _MOST_IMAGES
            and self._num_bytes < _MOST_BYTES
            and not self._is_full()
        )

    def _begin(self) -> bool:
        """Begins the next image; False where there is none."""
        entry, wait = next(self._begun, (None, None))
        if entry is None or wait is None:
            return False
        self._waiting[entry.key] = entry.size_bytes, wait
        self._num_bytes += entry.size_bytes
        return True
