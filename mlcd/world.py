"""The processes that work together: who we are among them, and sums and gathers over all.

Gathers carry gradients. A process's loss is scaled so that the average over processes, which is what data
parallelism takes of gradients, is the gradient of the mean loss over the global batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """A process group, or just this process (`group` None and `size` 1)."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def current(cls) -> "World":
        """The default process group where one is initialized, else this process alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes, without gradient; `tensor` itself is not changed."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The maximum over processes, without gradient; `tensor` itself is not changed."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def row_counts(self, num_rows: int, device: torch.device) -> list[int]:
        """How many rows each process holds, in order of rank."""
        if self.size == 1:
            return [num_rows]
        counts = torch.zeros(self.size, dtype=torch.int64, device=device)
        counts[self.rank] = num_rows
        return [int(count) for count in self.sum(counts)]

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all processes in order of rank; their numbers may differ. Gradients flow back to the owner."""
        if self.size == 1:
            return rows
        return _gather_rows(rows, self)

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.size == 1:
            return tensor
        reduced = tensor.detach().clone()
        dist.all_reduce(reduced, operation, group=self.group)
        return reduced


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World) -> Tensor:
        counts = world.row_counts(rows.shape[0], rows.device)
        ctx.world, ctx.counts = world, counts
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, group=world.group)
        return torch.cat([block[:count] for block, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        total = ctx.world.sum(gradients[0].contiguous())
        start = sum(ctx.counts[: ctx.world.rank])
        return total[start : start + ctx.counts[ctx.world.rank]], None


_gather_rows: Callable[[Tensor, World], Tensor] = _GatherRows.apply
