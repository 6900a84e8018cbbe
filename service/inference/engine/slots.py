"""Batches in memory that the server and an engine's process share: items, embeddings and labels.

No array is copied through a pipe.
"""

import mmap
import os
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.service.inference.served import ItemLayout

NUM_SLOTS: Final = 2  # one batch is computed while the next is filled
MOST_LABELS: Final = 64  # of one embedding; requests for more are answered by the server
_ALIGNMENT: Final = 8  # bytes of the widest type of an item


class Slots:
    """The shared arrays.

    items: [NUM_SLOTS, max_batch, *shape of an item]. rows: float32 [NUM_SLOTS, max_batch,
    dimension]. label_ids: int32 [NUM_SLOTS, max_batch, MOST_LABELS].
    """

    items: NDArray[Any]
    rows: NDArray[np.float32]
    label_ids: NDArray[np.int32]

    def __init__(
        self, descriptor: int, *, max_batch: int, item: ItemLayout, dimension: int
    ) -> None:
        """Maps the file of a descriptor that both processes share; the first sets its size."""
        row_shape = (NUM_SLOTS, max_batch, dimension)
        label_shape = (NUM_SLOTS, max_batch, MOST_LABELS)
        item_shape = (NUM_SLOTS, max_batch, *item.shape)
        # Items come last, so that all arrays are aligned for any size of an item.
        offset = -(-4 * (prod(row_shape) + prod(label_shape)) // _ALIGNMENT) * _ALIGNMENT
        size = offset + item.dtype.itemsize * prod(item_shape)
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        rows = np.frombuffer(memory, np.float32, count=prod(row_shape))
        self.rows = rows.reshape(row_shape)
        ids = np.frombuffer(memory, np.int32, count=prod(label_shape), offset=rows.nbytes)
        self.label_ids = ids.reshape(label_shape)
        self.items = np.frombuffer(memory, item.dtype, offset=offset).reshape(item_shape)
