"""Finds the nearest centers of small batches of rows, as a service does, on a device that holds the
centers.

The answers are proven (`mlcd.clustering.device_scan`); a row without a proof is left to the caller.
The first scan of each batch size is one CUDA graph, because a small batch costs little more than
the start of its kernels.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.clustering.device_scan import cuda_available, on_gpu
from mlcd.cuda_graphs import Recordings
from mlcd.errors import Unavailable
from mlcd.types import Embeddings

# Labels that are scanned for: this, the default of the API, or the next power of two.
_LEAST_TOP: Final = 8
_MOST_ROWS: Final = 256  # at once
# Fewest components of all centers: a core reads these 16 MiB in about 2 ms, in which a GPU scans a
# batch. Estimated.
LEAST_COMPONENTS: Final = 1 << 22
_BYTES_EACH: Final = 4 + 2  # of a component, in float32 and bfloat16
_NORM_BYTES: Final = 3 * 8  # of a center
_WORKING_BYTES: Final = 3 * 2**30  # for a block of centers, products and graphs. Estimated.


def has_device() -> bool:
    """Returns whether this machine has a GPU that can label."""
    return cuda_available()


class DeviceLabels:
    """The centers [K, D] on a device. Use from one thread."""

    def __init__(self, centers_KD: Embeddings, device: str = "cuda") -> None:
        """Raises Unavailable if a CUDA device has too little memory or the centers are few."""
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._check(*centers_KD.shape)
        self._num_centers = len(centers_KD)
        self._scan = on_gpu(centers_KD, device)
        self._most_rows = min(_MOST_ROWS, self._scan.batch_rows)
        shape = (self._most_rows, centers_KD.shape[1])
        self._rows_BD = torch.zeros(shape, device=self._device)  # the input of every recording
        self._recordings = Recordings[tuple[int, int], tuple[Tensor, Tensor]](self._device)

    def nearest(self, rows_BD: Embeddings, top: int) -> NDArray[np.int32]:
        """Returns the `top` nearest centers of each row, best first, int32 [B, top]. A row of -1
        means that they are not proven.

        top: at most the number of centers.
        """
        ids_BL = np.empty((len(rows_BD), top), np.int32)
        num = min(_next_power(max(top, _LEAST_TOP)), self._num_centers)
        for start in range(0, len(rows_BD), self._most_rows):
            part = slice(start, start + self._most_rows)
            with torch.inference_mode():
                ids_BL[part] = self._nearest(rows_BD[part], num)[:, :top]
        return ids_BL

    def _nearest(self, rows_BD: Embeddings, top: int) -> NDArray[np.int64]:
        bucket = min(_next_power(len(rows_BD)), self._most_rows)
        self._rows_BD[: len(rows_BD)].copy_(torch.tensor(rows_BD))
        ids, proven = self._recordings.run(
            (bucket, top),
            # the padding contains rows of an earlier batch, whose answers are discarded
            lambda: self._scan.propose(self._rows_BD[:bucket], top, self._scan.rooms[0]),
        )
        ids = ids[: len(rows_BD)].clone()
        open_rows = (~proven[: len(rows_BD)]).nonzero()[:, 0]
        if len(open_rows):
            again, unproven = self._scan.nearest(self._rows_BD[open_rows], top)
            again[unproven] = -1
            ids[open_rows] = again
        return ids.cpu().numpy()

    def _check(self, num: int, dimension: int) -> None:
        if not has_device():
            raise Unavailable("the GPU cannot multiply bfloat16")
        if num * dimension < LEAST_COMPONENTS:
            raise Unavailable(f"{num} centers are few")
        needed = num * (dimension * _BYTES_EACH + _NORM_BYTES) + _WORKING_BYTES
        free, _ = torch.cuda.mem_get_info(self._device)
        if needed > free:
            raise Unavailable(
                f"{num} centers need {needed / 2**30:.1f} GiB of the GPU's memory, and"
                f" {free / 2**30:.1f} are free"
            )


def _next_power(num: int) -> int:
    return 1 << (num - 1).bit_length()
