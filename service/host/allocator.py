"""The memory of a process: freed blocks go back to the system, and the collector skips the rest."""

import ctypes
import gc
from typing import Final

_M_MMAP_THRESHOLD: Final = -3  # <malloc.h>
_LARGE_BYTES: Final = 2**20


def return_large_blocks() -> None:
    """Makes the allocator return blocks of a mebibyte and more to the system once they are free.

    glibc begins like that, but stops after the first large image: 489 MiB stayed after decoding
    twelve images of up to 48 megapixels, 63 with this, in no more time
    (docs/explanation/pipeline.md). Fewer arenas (M_ARENA_MAX) and a lower M_TRIM_THRESHOLD gave
    nothing more in the same measurement. Other C libraries stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def pause_collector() -> None:
    """Stops the garbage collector until `keep_what_is_open`.

    A sixth of the time of importing the application would be its walks over what was imported.
    """
    gc.disable()


def keep_what_is_imported() -> None:
    """Hides all present objects from the garbage collector; call it after the imports.

    What they leave in cycles stays: under a thousand objects. To look for it takes 80 to 90 ms, a
    tenth of the start.
    """
    gc.freeze()


def keep_what_is_open() -> None:
    """Frees what opening the resources left, hides the rest, and lets the collector run.

    A full collection walks every object that is not hidden. With those of all imported libraries
    it takes 80 to 120 ms on one core of a Zen 4, during which no request is answered, every few
    seconds under load (`benchmarks/overload.py`).
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def free_what_was_closed() -> None:
    """Frees what hidden objects held in cycles; call it when many of them were closed."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
