"""The work of a process in the backbone's tests, in a module that spawned processes can import."""

import copy
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT
from mlcd.training.config import validate_config
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.head.row_adamw import center_optimizer
from mlcd.training.head.state import TrainState
from mlcd.training.optim.groups import parameter_groups
from mlcd.training.optim.optim_config import OptimConfig
from mlcd.training.parallel.backbone import Backbone
from mlcd.training.step import backward, train_step
from mlcd.world import World

CLASSES, IMAGE = 11, 8
CONFIG = validate_config(
    {
        "out": "RUN",
        "data": {"images": "IMAGES", "labels": "LABELS"},
        "model": {
            "image_size": IMAGE,
            "patch_size": 4,
            "width": 16,
            "depth": 2,
            "heads": 2,
            "mlp_width": 32,
            "embedding_dim": 6,
            "drop_path": 0.4,
        },
        "schedule": {"steps": 100},
    }
)
# Images of each micro-batch that each process has: none, unequal numbers, and a micro-batch that
# nobody has.
COUNTS = {
    2: ((3, 0), (0, 2), (0, 0), (1, 3)),
    3: ((1, 0, 2), (0, 2, 0), (0, 0, 0), (1, 0, 3)),
}


class Part(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor
    positions: NDArray[np.int64]
    weights: None = None
    more_views: tuple[torch.Tensor, ...] = ()


# Two global views and a local one, with changes of color; but no blur, which is a product of
# matrices in float32 and so depends on the batch in the last bit.
VIEWS = {"views": 2, "local_views": 1, "local_size": 4, "jitter": 0.9, "brightness": 0.4}
VIEWS |= {"hue": 0.1, "grayscale": 0.3, "solarize": [0.0, 0.6, 0.3]}
# The images that each process has of each micro-batch of a step over views.
VIEW_COUNTS = {2: ((3, 0), (2, 4)), 3: ((1, 0, 2), (0, 2, 4))}


def with_views():
    fields = CONFIG.model_dump(mode="json", exclude={"augment"})
    return validate_config({**fields, "augment": VIEWS})


def new_state(world, precision="fp64", **options):
    trunk = ViT(CONFIG.model.vit())
    trunk.initialize(torch.Generator().manual_seed(0))
    model = Servable(trunk, PreprocessSpec(resize_shortest=IMAGE, crop=IMAGE))
    state_of = Backbone(model, world, precision=precision, **options)
    head = PartialFC(CLASSES, 6, HeadConfig(scale=16.0, negative_ratio=0.5), world=world)
    head.initialize(0)
    if precision == "fp64":
        head.double()
    optim = OptimConfig()
    optimizer = torch.optim.AdamW(parameter_groups(trunk, optim), lr=optim.lr)
    return TrainState(state_of, head, optimizer, center_optimizer(head, optim))


def micro_batches(counts_of_all, rank, dtype=torch.float64):
    """This process's part of each micro-batch, and the shares of all."""
    batches, start = [], 0
    for index, counts in enumerate(counts_of_all):
        generator = torch.Generator().manual_seed(index)
        whole = (
            torch.rand((sum(counts), 3, IMAGE, IMAGE), generator=generator, dtype=torch.float64)
            * 255
        )
        ids = torch.randint(0, CLASSES, (sum(counts), 3), generator=generator)
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        positions = start + np.arange(sum(counts))
        start += sum(counts)
        batches.append(Part(whole[own].to(dtype), ids[own], positions[own]))
    total = sum(map(sum, counts_of_all))
    return batches, [sum(counts) / total for counts in counts_of_all]


def gradients(state, counts, rank=0, dtype=torch.float64):
    loss, _ = backward(state, *micro_batches(counts, rank, dtype), CONFIG)
    return {
        "loss": loss,
        **{name: each.grad.clone() for name, each in state.model.trunk.named_parameters()},
    }


def view_gradients(world, counts_of_all):
    """The gradients of a step over views, in micro-batches."""
    config, state = with_views(), new_state(world)
    plain, shares = micro_batches(counts_of_all, world.rank)
    # Another view is another crop; here, the same one mirrored, and its corner.
    batches = [
        part._replace(more_views=(part.images.flip(3), part.images[:, :, :4, :4])) for part in plain
    ]
    loss, meters = backward(state, batches, shares, config, counts_of_all)
    return {
        "loss": loss,
        **{name: each.grad.clone() for name, each in state.model.trunk.named_parameters()},
        **{name: meters[name] for name in ("positive_cosine", "negative_cosine")},
    }


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sharded_losses(world, gathered):
    """The losses of three steps of a sharded tower, and the types of a block's weights: while it
    computes, at rest, and of their gradients.
    """
    state = new_state(world, "bf16", sharded=True, gathered=gathered)
    layer, types = state.model.trunk.blocks[0].mlp.fc1, set()
    layer.register_forward_hook(lambda *_: types.add(layer.weight.dtype))
    parts, shares = micro_batches(((3, 2), (1, 3)), world.rank, torch.float32)
    losses = []
    for _ in range(3):
        loss, _ = backward(state, parts, shares, CONFIG)
        gradient = layer.weight.grad.dtype
        losses.append(train_step(state, parts, shares, CONFIG).loss.item())
        assert losses[-1] == loss
    return losses, (*types, layer.weight.dtype, gradient)


def run(rank, size, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{size}", rank=rank, world_size=size
    )
    results = {"plain": gradients(new_state(World.current()), COUNTS[size], rank)}
    results["views"] = view_gradients(World.current(), VIEW_COUNTS[size])
    torch.save(results, f"{folder}/gradients-{size}-{rank}.pt")
    if size == 2:
        found = {gathered: sharded_losses(World.current(), gathered) for gathered in TYPES}
        torch.save(found, f"{folder}/sharded-{rank}.pt")
    dist.destroy_process_group()


def run_twice(rank, size, folder):
    """A process's third backward pass, and the first one of a process that begins there."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size
    )
    world = World.current()
    state = new_state(world, "fp32")
    for _ in range(2):
        gradients(state, COUNTS[size], rank, torch.float32)
    later = copy.deepcopy(gradients(state, COUNTS[size], rank, torch.float32))
    first = gradients(new_state(world, "fp32"), COUNTS[size], rank, torch.float32)
    torch.save((later, first), f"{folder}/both-{rank}.pt")
    dist.destroy_process_group()
