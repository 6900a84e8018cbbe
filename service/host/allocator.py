"""The memory of a process: settings of the C allocator and of the garbage collector."""

import ctypes
import gc
from typing import Final

_M_MMAP_THRESHOLD: Final = -3  # <malloc.h>
_LARGE_BYTES: Final = 2**20


def return_large_blocks() -> None:
    """Makes the allocator return blocks of 1 MiB and more to the system when they are freed.

    glibc does so at first, but raises its threshold when the first large image is freed: resident
    memory after decoding twelve images of up to 48 megapixels was 489 MiB, and is 63 MiB with this
    setting, in the same time (docs/explanation/pipeline.md). Fewer arenas (M_ARENA_MAX) and a lower
    M_TRIM_THRESHOLD had no further effect. Other C libraries are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def pause_collector() -> None:
    """Stops the garbage collector until `keep_what_is_open`.

    Otherwise its collections would take a sixth of the application's import time.
    """
    gc.disable()


def keep_what_is_imported() -> None:
    """Excludes all current objects from garbage collection; call it after the imports.

    Garbage cycles of the imports are never freed: they have fewer than a thousand objects, and a
    collection would take 80 to 90 ms, a tenth of the start.
    """
    gc.freeze()


def keep_what_is_open() -> None:
    """Collects garbage once the resources are open, excludes all remaining objects from later
    collections, and starts the collector.

    A full collection visits every object that is not excluded. With the objects of all imported
    libraries it takes 80 to 120 ms on one core of a Zen 4, every few seconds under load, and no
    request is answered meanwhile (`benchmarks/overload.py`).
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def free_what_was_closed() -> None:
    """Frees cycles among excluded objects; call it after many of these objects were closed."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
