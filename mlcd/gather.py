"""The rows of several processes as one tensor, with gradients.

A process's loss is scaled so that the average over processes is the gradient of the mean loss over
the global batch; data parallelism averages gradients in this way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], rank: int, group: Any) -> Tensor:
        ctx.counts, ctx.rank, ctx.group = counts, rank, group
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, group=group)
        return torch.cat([block[:count] for block, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        # Each process receives only its own rows' gradients: half the traffic of an all-reduce.
        gradient = gradients[0].detach()
        blocks = gradient.new_zeros((len(ctx.counts), max(ctx.counts), *gradient.shape[1:]))
        for block, rows in zip(blocks, gradient.split(list(ctx.counts)), strict=True):
            block[: len(rows)] = rows
        own = torch.empty_like(blocks[0])
        dist.reduce_scatter(own, list(blocks.unbind(0)), dist.ReduceOp.SUM, group=ctx.group)
        return own[: ctx.counts[ctx.rank]], None, None, None


# (rows, counts, rank, group) -> rows of all processes by rank; process i has counts[i] rows
gather_rows: Callable[[Tensor, Sequence[int], int, Any], Tensor] = _GatherRows.apply
