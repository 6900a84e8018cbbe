"""Assigns and sums the rows of k-means on a device, where as many rows stay as fit; other rows are
read again in every pass and copied from pinned memory.

Rows are summed as in `mlcd.clustering.sums`, as int64 multiples of 2^-33, whose order of addition
does not matter. After the first pass only rows that go to another center are moved between sums,
and a row whose center is the vector of the last pass is compared with it and with the centers that
are not. The host reads, checks and normalizes rows, settles the few rows whose nearest center the
device cannot prove, and computes the next centers from the sums.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlcd.clustering.device_products import GROUP
from mlcd.clustering.device_scan import on_gpu
from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.rows import Rows, kept_bytes
from mlcd.clustering.sums import SCALE, ClusterSums
from mlcd.errors import Unavailable
from mlcd.types import Embeddings
from mlcd.world import World

# Bytes per component of the centers, left free of rows: 6 for the centers of a pass in float32 and
# bfloat16, 8 for the copy of the sums that processes add up.
_COMPONENT_BYTES: Final = 6 + 8
_WORKING_BYTES: Final = 4 * 2**30  # for the products and sums of a block; not measured on a GPU


class DeviceMembers:
    """The rows of a process on a device: the center of each, and the sums of each center's rows.

    assignment: [own rows] int32, on the host. `assign` raises Unavailable if the device runs
    out of memory; this object is of no use then.
    """

    def __init__(
        self, rows: Rows, num_clusters: int, world: World, device: str, most_bytes: int | None
    ) -> None:
        """most_bytes: bytes of rows that stay on the device; None for as many as fit."""
        self._rows, self._world, self._device = rows, world, torch.device(device)
        self._start, self._stop = world.own_rows(rows.num_rows)
        self._next = self._start  # the first row that does not stay on the device
        self._blocks: list[tuple[int, Tensor]] = []
        self._has_sums = False
        self._last_centers: Embeddings | None = None
        self.assignment: NDArray[np.int32] = np.full(self._stop - self._start, -1, np.int32)
        with _unavailable_without_memory():
            shape = (num_clusters, rows.dimension)
            self._sums = torch.zeros(shape, dtype=torch.int64, device=device)
            self._sizes = torch.zeros(num_clusters, dtype=torch.int64, device=device)
            self._ids = torch.full((len(self.assignment),), -1, dtype=torch.int32, device=device)
        self._room = self._free_bytes(shape) if most_bytes is None else most_bytes

    def assign(self, centers: Embeddings) -> int:
        """Assigns every row to its nearest center; returns the number of this process's rows whose
        center changed.
        """
        with _unavailable_without_memory(), torch.inference_mode():
            current = _DeviceCenters(centers, self._last_centers, self._device)
            moved = 0
            for start, rows in self._read():
                own = self._ids[start - self._start :][: len(rows)]
                nearest = current.nearest(rows, own)
                changed = (nearest != own).nonzero()[:, 0]
                self._move(rows[changed], own[changed], nearest[changed])
                own.copy_(nearest)
                moved += len(changed)
            self._has_sums, self._last_centers = True, centers
            self.assignment = self._ids.cpu().numpy()
        return moved

    def totals(self) -> ClusterSums:
        """Returns the sums over all processes, added up on the device of the process group."""
        sums, sizes = (
            self._world.sum(each.to(self._world.device) if self._world.size > 1 else each)
            for each in (self._sums, self._sizes)
        )
        return ClusterSums(sums.cpu().numpy(), sizes.cpu().numpy())

    def _read(self) -> Iterator[tuple[int, Tensor]]:
        """Yields (id of the first row, rows on the device). A thread reads one block ahead."""
        yield from self._blocks
        blocks = self._rows.blocks(self._next, self._stop)

        def read() -> tuple[int, Tensor] | None:
            if (block := next(blocks, None)) is None:
                return None
            rows = torch.from_numpy(np.require(block[1], requirements=["C", "W"]))
            return block[0], rows.pin_memory() if self._device.type == "cuda" else rows

        with ThreadPoolExecutor(1) as thread:
            ahead = thread.submit(read) if self._next < self._stop else None
            while ahead is not None and (block := ahead.result()) is not None:
                ahead = thread.submit(read)
                start, rows = block[0], self._copy(block[1])
                if start == self._next and rows.nbytes <= self._room:
                    self._blocks.append((start, rows))
                    self._next, self._room = start + len(rows), self._room - rows.nbytes
                yield start, rows

    def _copy(self, rows: Tensor) -> Tensor:
        return rows.to(self._device, non_blocking=True)

    def _move(self, rows: Tensor, before: Tensor, now: Tensor) -> None:
        """Moves rows from the sums of the centers `before` to those of the centers `now`."""
        fixed = rows.double().mul_(SCALE).round_().long()
        ones = torch.ones_like(now)
        self._sums.index_add_(0, now, fixed)
        self._sizes.index_add_(0, now, ones)
        if self._has_sums:
            self._sums.index_add_(0, before.long(), fixed, alpha=-1)
            self._sizes.index_add_(0, before.long(), ones, alpha=-1)

    def _free_bytes(self, shape: tuple[int, int]) -> int:
        """Returns the bytes for rows beside the centers [K, D] and the work on a block."""
        if self._device.type != "cuda":
            return kept_bytes(self._stop - self._start, shape[1])
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(0, free - _COMPONENT_BYTES * shape[0] * shape[1] - _WORKING_BYTES)


class _DeviceCenters:
    """The centers of a pass on the device, those that differ from the last pass first.

    A row whose center does not differ was nearer to it than to any other, so that only centers that
    differ can be nearer now. All others are compared with all centers.
    """

    def __init__(
        self, centers: Embeddings, last_centers: Embeddings | None, device: torch.device
    ) -> None:
        self._centers = centers
        differs = np.ones(len(centers), np.bool_)
        if last_centers is not None:
            differs = (_as_bytes(centers) != _as_bytes(last_centers))[:, 0]
        self._num_first = max(1, -(-int(differs.sum()) // GROUP)) * GROUP
        self._skips = self._num_first < len(centers)
        order = np.argsort(~differs, kind="stable") if self._skips else np.arange(len(centers))
        self._scan = on_gpu(centers[order] if self._skips else centers, str(device))
        self._ids = torch.from_numpy(order).to(device)  # of the scan's centers
        self._places = torch.argsort(self._ids)  # of the centers in the scan

    def nearest(self, rows: Tensor, last: Tensor) -> Tensor:
        """Returns the nearest center of each row, int64 [N]. Ties go to the lowest id.

        last: [N] the nearest of the last pass's centers.
        """
        if not self._skips:
            places, unproven = self._scan.nearest(rows)
            return self._settle(rows, places[:, 0], unproven)
        places = self._places[last.long()]
        stays = places >= self._num_first
        changed, kept = (~stays).nonzero()[:, 0], stays.nonzero()[:, 0]
        found, unproven = self._scan.nearest(rows[changed])
        few = self._scan.first(self._num_first)
        found_few, unproven_few = few.nearest(rows[kept], also_B=places[kept])
        places[changed], places[kept] = found[:, 0], found_few[:, 0]
        return self._settle(rows, places, torch.cat([changed[unproven], kept[unproven_few]]))

    def _settle(self, rows: Tensor, places: Tensor, unproven: Tensor) -> Tensor:
        ids = self._ids[places]
        if len(unproven):
            exact = self._exact_scan.nearest(rows[unproven].cpu().numpy(), 1).ids[:, 0]
            ids[unproven] = torch.from_numpy(exact.astype(np.int64)).to(ids)
        return ids

    @cached_property
    def _exact_scan(self) -> CenterScan:
        """The scan of the CPU for rows that the device leaves open."""
        return CenterScan(self._centers, matmul="numpy")


def _as_bytes(centers: Embeddings) -> NDArray[np.void]:
    """Returns the bytes of each center as one value, [K, 1]."""
    return np.ascontiguousarray(centers).view(f"V{centers.itemsize * centers.shape[1]}")


@contextmanager
def _unavailable_without_memory() -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise Unavailable(
            "the GPU has too little memory for the sums of k-means", remedy="ask for fewer clusters"
        ) from error
