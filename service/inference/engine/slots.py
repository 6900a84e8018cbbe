"""Batches in memory that two processes share: pixels go one way, embeddings the other.

Nothing is copied through a pipe.
"""

import mmap
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_SLOTS: Final = 2  # one batch runs while the next one is ready


class Slots:
    """The shared arrays.

    pixels: uint8 [NUM_SLOTS, max_batch, 3, crop, crop].
    rows: float32 [NUM_SLOTS, max_batch, dimension].
    """

    pixels: NDArray[np.uint8]
    rows: NDArray[np.float32]

    def __init__(self, descriptor: int, *, max_batch: int, crop: int, dimension: int) -> None:
        """Maps the file of a descriptor that both processes have; the first one sets its size."""
        row_shape, pixel_shape = (
            (NUM_SLOTS, max_batch, dimension),
            (NUM_SLOTS, max_batch, 3, crop, crop),
        )
        row_bytes = 4 * int(np.prod(row_shape))
        size = row_bytes + int(np.prod(pixel_shape))
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        # Rows come first, so that they are aligned whatever the size of an image.
        self.rows = np.frombuffer(memory, np.float32, count=int(np.prod(row_shape))).reshape(
            row_shape
        )
        self.pixels = np.frombuffer(memory, np.uint8, offset=row_bytes).reshape(pixel_shape)
