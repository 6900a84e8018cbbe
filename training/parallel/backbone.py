"""The towers over processes: replicated with averaged gradients (ddp), or sharded themselves
(fsdp).
"""

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
from mlcd.models.vit import VisionTower, ViT
from mlcd.training.parallel.compute_config import Gathered, Precision
from mlcd.world import World

_BUCKET_MIB: Final = (
    25  # torch's default: gradients that are summed at once, while the backward pass goes on
)


class Backbone:
    """A Servable as a step uses it.

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
        """See `ComputeConfig` for the meaning of each."""
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
        """Returns embeddings [B, D], not yet unit, for float images [B, 3, S, S] in 0..255; B may
        be 0.

        branch_scales: [blocks, 2, B], see `mlcd.training.data.drop_path`.
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

        In it, gradients stay on each process. FSDP sums them each time all the same: whole
        gradients of a tower that needs FSDP would not fit.
        """
        return nullcontext() if self._replicas is None else self._replicas.no_sync()

    def replica(self, weights: Mapping[str, Tensor] | None = None) -> Servable:
        """Returns the whole model on this process, for evaluation; every process calls it.

        weights: tensors that take the place of the tower's own.
        """
        if weights is None and not self._sharded:
            return self.model
        with torch.device("meta"):
            trunk = ViT(self.model.trunk.config)
        weights = weights or self.model.trunk.state_dict()
        state = {name: _whole(tensor) for name, tensor in weights.items()}
        trunk.load_state_dict(state, assign=True)
        like = next(iter(state.values()))
        return Servable(trunk, self.model.preprocess).to(like.device, like.dtype)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TextBackbone:
    """A text tower as a step uses it, replicated over processes with averaged gradients.

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
        """See `ComputeConfig` for the meaning of each."""
        self.trunk, self.world = trunk, world
        self._bf16 = precision == "bf16"
        if precision == "fp64":
            trunk.double()
        self._replicas = None
        if world.size > 1:
            nothing = torch.zeros(
                (0, trunk.config.context_length), dtype=torch.int64, device=trunk.pos.device
            )
            self._replicas = _replicate(trunk, world, nothing)
        _prepare_blocks(trunk.blocks, recompute=recompute, compiled=compiled)

    def embed(self, ids: Tensor) -> Tensor:
        """Returns embeddings [B, D], not yet unit, of token ids [B, T]; B may be 0."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._bf16):
            embedding: Tensor = (self._replicas or self.trunk)(ids)
            return embedding

    def accumulating(self) -> AbstractContextManager[None]:
        """A context for `embed` and the backward pass of every micro-batch but a step's last."""
        return nullcontext() if self._replicas is None else self._replicas.no_sync()


def _prepare_blocks(blocks: nn.ModuleList, *, recompute: bool, compiled: bool) -> None:
    for block in blocks:
        if recompute:
            # Nothing in a block is random. On the instance, so that the names of parameters stay.
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
        if compiled:
            block.compile()


def _replicate(
    trunk: VisionTower | TextTower, world: World, nothing: Tensor
) -> DistributedDataParallel:
    """Replicates a tower; nothing: an input of no samples."""
    replicas = DistributedDataParallel(
        trunk,
        process_group=world.group,
        bucket_cap_mb=_BUCKET_MIB,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
    )
    # DDP changes its buckets after a process's first backward pass, and a sum over three processes
    # depends on an entry's place in its bucket. A resumed run would then differ in the last bits,
    # so that first pass is one without samples.
    replicas(nothing).sum().backward()
    trunk.zero_grad(set_to_none=True)
    return replicas


def _shard(trunk: VisionTower, world: World, gathered: Gathered) -> None:
    """Shards the parameters block by block, and together those that are outside of blocks."""
    device = next(trunk.parameters()).device
    mesh = init_device_mesh(device.type, (world.size,))
    # Autocast computes from float32 to float32; only the weights of products come as bfloat16.
    short = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Linear layers return views, and blocks change none in place, so the warning about it is void.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    for block in trunk.blocks:
        if gathered == "bf16":
            # The norms are computed in float32, so they go with what is outside.
            products = [block.get_submodule(name) for name in ("attn", "mlp")]
            fully_shard(products, mesh=mesh, mp_policy=short)
        else:
            fully_shard(block, mesh=mesh)
    fully_shard(trunk, mesh=mesh)
