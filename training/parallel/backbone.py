"""The tower over processes: replicated with averaged gradients (ddp), or sharded itself (fsdp)."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from mlcd.models.servable import Servable
from mlcd.models.vit import ViT
from mlcd.world import World
from training.config import ComputeConfig

BUCKET_ENTRIES = 1 << 24  # gradients reduced at once: 64 MiB in float32


class Backbone:
    """A Servable as a step uses it. What is computed does not depend on the options, beyond rounding."""

    def __init__(self, model: Servable, compute: ComputeConfig, world: World) -> None:
        self.model, self.world = model, world
        self._bf16 = compute.precision == "bf16"
        if compute.precision == "fp64":
            model.double()
        _prepare_blocks(model.trunk, compute)
        self._sharded = compute.backbone == "fsdp" and world.size > 1
        if self._sharded:
            _shard(model.trunk, world)

    def embed(self, images: Tensor) -> Tensor:
        """Embeddings [B, D], not yet unit, of float images [B, 3, S, S] with values 0..255."""
        device = images.device.type
        context: AbstractContextManager[None] = torch.autocast(device, torch.bfloat16, enabled=self._bf16)
        with context:
            return self.model.embed(images)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Over processes, as the head's gradients want it; once, after the last micro-batch of a step."""
        if self._sharded or self.world.size == 1:  # fsdp has averaged them in the backward pass
            return
        for bucket in _buckets(list(self.model.trunk.parameters())):
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
            total = self.world.sum(torch.cat([gradient.flatten() for gradient in gradients])) / self.world.size
            for parameter, mean in zip(bucket, total.split([each.numel() for each in bucket]), strict=True):
                parameter.grad = mean.view_as(parameter)

    def replica(self) -> Servable:
        """The model whole on this process, for evaluation; every process calls it."""
        if not self._sharded:
            return self.model
        with torch.device("meta"):
            trunk = ViT(self.model.trunk.config)
        state = {name: whole(tensor) for name, tensor in self.model.trunk.state_dict().items()}
        trunk.load_state_dict(state, assign=True)
        like = next(iter(state.values()))
        return Servable(trunk, self.model.preprocess).to(like.device, like.dtype)


def whole(tensor: Tensor) -> Tensor:
    """A tensor of the tower in full, where it is sharded; then every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor on the parameter's device, and sharded as the parameter is."""
    moved = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(moved, parameter.device_mesh, parameter.placements)
    return moved


def _prepare_blocks(trunk: ViT, compute: ComputeConfig) -> None:
    for block in trunk.blocks:
        if compute.recompute:
            # Nothing in a block is random. On the instance, so that the names of parameters stay.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        if compute.compile:
            block.compile()


def _shard(trunk: ViT, world: World) -> None:
    device = next(trunk.parameters()).device
    mesh = init_device_mesh(device.type, (world.size,))
    for block in trunk.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(trunk, mesh=mesh)


def _buckets(parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    entries = 0
    for parameter in parameters:
        bucket.append(parameter)
        entries += parameter.numel()
        if entries >= BUCKET_ENTRIES:
            yield bucket
            bucket, entries = [], 0
    if bucket:
        yield bucket
