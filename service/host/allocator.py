"""What the allocator does with memory that is free again."""

import ctypes
import gc
from typing import Final

_M_MMAP_THRESHOLD: Final = -3  # <malloc.h>
_LARGE_BYTES: Final = 2**20


def return_large_blocks() -> None:
    """Give blocks of a mebibyte and more back to the system as soon as they are free, as long as the process lives.

    glibc begins like that, but stops after the first large picture: 489 MiB stayed after decoding twelve pictures of
    up to 48 megapixels, 63 with this, in no more time (docs/explanation/pipeline.md). Fewer arenas (M_ARENA_MAX) and a
    lower M_TRIM_THRESHOLD gave nothing more, measured there too. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def keep_what_is_open() -> None:
    """Take all objects there are out of the garbage collector's sight, once what a process serves with is open.

    A full collection walks every object, of all the imported libraries too: 80 to 120 ms on one core of a Zen 4, in
    which nobody is answered, every few seconds under load (`benchmarks/overload.py`). Call it again when much of it was
    closed: what that holds in cycles is let go then, and else never.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
