"""Batches in memory that two processes share: items go one way, embeddings the other.

Nothing is copied through a pipe.
"""

import mmap
import os
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.service.inference.served import ItemLayout

NUM_SLOTS: Final = 2  # one batch runs while the next one is ready
_ALIGNED: Final = 8  # bytes; the widest type of an item


class Slots:
    """The shared arrays.

    items: [NUM_SLOTS, max_batch, *shape of one item]. rows: float32 [NUM_SLOTS, max_batch,
    dimension].
    """

    items: NDArray[Any]
    rows: NDArray[np.float32]

    def __init__(
        self, descriptor: int, *, max_batch: int, item: ItemLayout, dimension: int
    ) -> None:
        """Maps the file of a descriptor that both processes have; the first one sets its size."""
        row_shape = (NUM_SLOTS, max_batch, dimension)
        item_shape = (NUM_SLOTS, max_batch, *item.shape)
        # Rows come first, so that both are aligned whatever the size of an item.
        offset = -(-4 * prod(row_shape) // _ALIGNED) * _ALIGNED
        size = offset + item.dtype.itemsize * prod(item_shape)
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        rows = np.frombuffer(memory, np.float32, count=prod(row_shape))
        self.rows = rows.reshape(row_shape)
        self.items = np.frombuffer(memory, item.dtype, offset=offset).reshape(item_shape)
