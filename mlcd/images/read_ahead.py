"""Reads images before they are requested."""

import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from mlcd.images.entries import Entry
from mlcd.types import SampleKey

# waits for the bytes of an image whose read has started, and returns them
Wait: TypeAlias = Callable[[], bytes]
_MOST_IMAGES: Final = 4096
_AT_ONCE: Final = 256  # reads started per image taken, so that `take` stays fast
_MOST_BYTES: Final = 64 << 20  # by the sizes in the listing


class ReadAhead:
    """The images being read, in the order in which they will be requested.

    started: iterator that starts the read of each image it yields. is_full: returns whether no
    further read may start, in addition to the limits here.
    """

    def __init__(
        self, started: Iterator[tuple[Entry, Wait]], is_full: Callable[[], bool] = lambda: False
    ) -> None:
        self._started, self._is_full = started, is_full
        self._lock = threading.Lock()
        self._waiting: dict[SampleKey, tuple[int, Wait]] = {}
        self._num_bytes = 0

    def take(self, entry: Entry) -> Wait | None:
        """Returns a function that waits for an image, and starts further reads; None if the image
        was not announced. It is thread-safe.
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
        """Starts to read the next image; returns False if there is none."""
        entry, wait = next(self._started, (None, None))
        if entry is None or wait is None:
            return False
        self._waiting[entry.key] = entry.size_bytes, wait
        self._num_bytes += entry.size_bytes
        return True
