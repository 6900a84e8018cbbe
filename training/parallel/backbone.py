"""The towers on several processes: replicated with averaged gradients (ddp), or sharded (fsdp)."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mlcd.models.servable import Servable
from mlcd.models.text import TextTower
from mlcd.models.vit import ViT
from mlcd.training.parallel.compute_config import Gathered, Precision
from mlcd.world import World

# torch's default: gradients summed in one all-reduce, which overlaps with the backward pass
_BUCKET_MIB: Final = 25


class Backbone:
    """An image tower in the form that a training step uses.

    Options change results by no more than rounding.
    """

    def __init__(
        self,
        model: Servable,
        world: World,
        *,
        precision: Precision = "fp32",
        sharded: bool = False,
        gathered: Gathered = "fp32",
        recompute: bool = False,
        compiled: bool = False,
    ) -> None:
        """For the meaning of the options see `ComputeConfig`."""
        self.model, self.world = model, world
        self._bf16 = precision == "bf16"
        if precision == "fp64":
            model.double()
        self._sharded = sharded and world.size > 1
        trained = any(parameter.requires_grad for parameter in model.trunk.parameters())
        replicate = world.size > 1 and not self._sharded and trained
        self._replicas = None
        if replicate:
            side, like = model.trunk.config.image_size, next(model.trunk.parameters())
            self._replicas = _replicate(model.trunk, world, like.new_zeros((0, 3, side, side)))
        _prepare_blocks(model.trunk.blocks, recompute=recompute, compiled=compiled)
        if self._sharded:
            _shard(model.trunk, world, gathered)

    def embed(self, images: Tensor, branch_scales: Tensor | None = None) -> Tensor:
        """Returns embeddings [B, D], not normalized.

        images: float [B, 3, S, S] in 0..255; B may be 0. branch_scales: [blocks, 2, B], see
        `mlcd.training.data.drop_path`.
        """
        device = images.device.type
        context: AbstractContextManager[None] = torch.autocast(
            device, torch.bfloat16, enabled=self._bf16
        )
        with context:
            pixels = self.model.normalize(images)
            embedding: Tensor = (self._replicas or self.model.trunk)(pixels, None, branch_scales)
            return embedding

    def accumulating(self) -> AbstractContextManager[None]:
        """A context for `embed` and the backward pass of every micro-batch but a step's last.

        Inside it, DDP does not sum gradients over processes. FSDP still does: unsharded gradients
        of a tower that needs FSDP would not fit in memory.
        """
        return nullcontext() if self._replicas is None else self._replicas.no_sync()

    def replica(self, weights: Mapping[str, Tensor] | None = None) -> Servable:
        """Returns the whole model on this process, for evaluation; every process calls it.

        weights: weights to use instead of the tower's.
        """
        if weights is None and not self._sharded:
            return self.model
        with torch.device("meta"):
            trunk = ViT(self.model.trunk.config)
        weights = weights or self.model.trunk.state_dict()
        state = {name: _gather_whole(tensor) for name, tensor in weights.items()}
        trunk.load_state_dict(state, assign=True)
        like = next(iter(state.values()))
        return Servable(trunk, self.model.preprocess).to(like.device, like.dtype)


def _gather_whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TextBackbone:
    """A text tower in the form that a step uses, replicated with averaged gradients.

    Options change results by no more than rounding.
    """

    def __init__(
        self,
        trunk: TextTower,
        world: World,
        *,
        precision: Precision = "fp32",
        recompute: bool = False,
        compiled: bool = False,
    ) -> None:
        """For the meaning of the options see `ComputeConfig`."""
        self.trunk, self.world = trunk, world
        self._bf16 = precision == "bf16"
        if precision == "fp64":
            trunk.double()
        self._replicas = None
        if world.size > 1:
            empty_input = torch.zeros(
                (0, trunk.config.context_length), dtype=torch.int64, device=trunk.pos.device
            )
            self._replicas = _replicate(trunk, world, empty_input)
        _prepare_blocks(trunk.blocks, recompute=recompute, compiled=compiled)

    def embed(self, ids: Tensor) -> Tensor:
        """Returns embeddings [B, D], not normalized, of token ids [B, T]; B may be 0."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._bf16):
            embedding: Tensor = (self._replicas or self.trunk)(ids)
            return embedding

    def accumulating(self) -> AbstractContextManager[None]:
        """A context for `embed` and the backward pass of every micro-batch but a step's last."""
        return nullcontext() if self._replicas is None else self._replicas.no_sync()


def _prepare_blocks(blocks: nn.ModuleList, *, recompute: bool, compiled: bool) -> None:
    for block in blocks:
        if recompute:
            # Blocks use no random numbers. Set on the instance to keep the parameters' names.
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
        if compiled:
            block.compile()


def _replicate(
    trunk: ViT | TextTower, world: World, empty_input: Tensor
) -> DistributedDataParallel:
    """Replicates a tower. empty_input: an input with no samples."""
    replicas = DistributedDataParallel(
        trunk,
        process_group=world.group,
        bucket_cap_mb=_BUCKET_MIB,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
    )
    # DDP rearranges its buckets after the first backward pass, and with three processes a sum
    # depends on the entry's place in its bucket. A resumed run would differ in the last bits, so
    # the first pass is done here, without samples.
    replicas(empty_input).sum().backward()
    trunk.zero_grad(set_to_none=True)
    return replicas


def _shard(trunk: ViT, world: World, gathered: Gathered) -> None:
    """Shards each block as one unit, and the parameters outside of blocks as another."""
    device = next(trunk.parameters()).device
    mesh = init_device_mesh(device.type, (world.size,))
    # Activations stay float32 for autocast; only the weights of products are gathered in bfloat16.
    short = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Linear layers return views, but blocks do not change them in place, so the warning is void.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    for block in trunk.blocks:
        if gathered == "bf16":
            # The norms need float32 weights, so they are sharded with the rest of the tower.
            products = [block.get_submodule(name) for name in ("attn", "mlp")]
            fully_shard(products, mesh=mesh, mp_policy=short)
        else:
            fully_shard(block, mesh=mesh)
    fully_shard(trunk, mesh=mesh)
