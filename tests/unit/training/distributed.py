"""The work of a process in the distributed tests, in a module that spawned processes can import."""

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded

from mlcd.losses.contrastive import clip_loss, siglip_loss
from mlcd.training.checkpoint.files import read_tensor_sizes, read_tensors, write_tensors
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.head.row_adamw import RowAdamW
from mlcd.training.head.shards import Shard
from mlcd.training.optim.clip import clip_global_norm
from mlcd.world import World

DIMENSION, INPUT = 8, 6


def batch(num_classes, labels_per_sample, num=12, seed=0):
    """Inputs [num, INPUT] and ragged labels with duplicates, all float64/int64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((num, INPUT), generator=generator, dtype=torch.float64)
    labels = torch.randint(0, num_classes, (num, labels_per_sample), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -1
    labels[1] = -1
    return x, labels


def split(num, size):
    """Unequal slices: the first process takes twice as many, as far as that goes."""
    weights = [2, *([1] * (size - 1))]
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + num * weight // sum(weights))
    bounds[-1] = num
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def backbone():
    module = nn.Linear(INPUT, DIMENSION).double()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def head_step(world, config, num_classes, x, labels, *, step=4, accumulate=1, weights=None):
    """Loss, backbone gradient as DDP would average it, and the rows of the center gradient of this
    process.
    """
    trunk = backbone()
    head = PartialFC(num_classes, DIMENSION, config, world=world).double()
    head.initialize(7)
    with torch.no_grad():
        head.weight.mul_(
            torch.linspace(50, 150, num_classes)[head.shard.start : head.shard.stop, None]
        )
    total = 0.0
    for part in range(accumulate):
        rows = slice(part * len(x) // accumulate, (part + 1) * len(x) // accumulate)
        counted = None if weights is None else weights[rows]
        output = head(trunk(x[rows]), labels[rows], step, weights=counted)
        (output.loss / accumulate).backward()
        total += output.loss.item() / accumulate
    gradient = head.weight.grad
    if gradient is not None and gradient.is_sparse:
        gradient = gradient.coalesce().to_dense()
    trunk_gradient = torch.cat([p.grad.flatten() for p in trunk.parameters()])
    return {
        "loss": total,
        "trunk": world.sum(trunk_gradient) / world.size,
        "centers": gradient if gradient is not None else torch.zeros_like(head.weight),
        "shard": (head.shard.start, head.shard.stop),
        "scalars": torch.tensor([each.grad for each in head.scalars.values()]),
        "meters": {name: meter.item() for name, meter in output.meters.items()},
    }


def clip_step(world):
    """Gradients after clipping by one norm: a backbone's, alike everywhere, and this process's rows
    of a shard's.
    """
    generator = torch.Generator().manual_seed(1)
    dense, whole = (
        torch.randn(5, generator=generator).double(),
        torch.randn((11, 3), generator=generator).double(),
    )
    shard = Shard.of(world.rank, world.size, 11)
    backbone_parameter, rows = (
        torch.zeros_like(dense),
        torch.zeros(len(shard), 3, dtype=torch.float64),
    )
    backbone_parameter.grad, own = dense, whole[shard.start : shard.stop]
    rows.grad = torch.sparse_coo_tensor(
        torch.arange(len(shard))[None], own, own.shape, check_invariants=True
    )
    norms = clip_global_norm([backbone_parameter], [rows], 0.5, world)
    # `gradients` are compared whole on every process: the shards are put together first.
    centers = world.gather_rows(rows.grad.to_dense())
    return {
        "loss": torch.stack(norms).sum().item(),
        "gradients": torch.cat([backbone_parameter.grad, centers.flatten()]),
    }


def contrastive_step(world, kind, x, y):
    images, texts = backbone(), backbone()
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    a, b = (nn.functional.normalize(tower(z), dim=1) for tower, z in ((images, x), (texts, y)))
    loss = (
        clip_loss(a, b, scale, world=world)
        if kind == "clip"
        else siglip_loss(a, b, scale, bias, world=world)
    )
    loss.backward()
    scalars = [scale.grad, *([bias.grad] if kind == "siglip" else [])]
    towers = [p.grad.flatten() for tower in (images, texts) for p in tower.parameters()]
    gradients = torch.cat([*towers, torch.stack(scalars)])
    return {
        "loss": (world.sum(loss.detach()) / world.size).item(),
        "gradients": world.sum(gradients) / world.size,
    }


def cases():
    base = {"scale": 16.0, "margin_grad": "exact", "seed": 5}
    for kind in ("mlcd", "mlc", "cd"):
        for ratio in (1.0, 0.4):
            yield f"{kind}-{ratio}", HeadConfig(kind=kind, negative_ratio=ratio, **base), 11, 4
    yield "partialfc", HeadConfig(negative_ratio=0.3, policy="partialfc", **base), 23, 4
    yield "corrected", HeadConfig(negative_ratio=0.3, correct_ratio=True, bias=-3.0, **base), 23, 4
    yield "filtered", HeadConfig(negative_ratio=1.0, filter_threshold=0.2, **base), 23, 4
    yield "fewer-classes-than-processes", HeadConfig(negative_ratio=1.0, **base), 2, 2
    yield "dense", HeadConfig(negative_ratio=0.4, center_update="dense", **base), 11, 4


def resharded_loss(world, weight=None):
    """The loss of a later step on the whole batch, every process with its part; all
    labels present.
    """
    x, labels = batch(11, 4, num=12, seed=2)
    own = split(len(x), world.size)[world.rank]
    head = PartialFC(
        11, DIMENSION, HeadConfig(scale=16.0, negative_ratio=0.5), world=world
    ).double()
    with torch.no_grad():
        head.weight.copy_(weight)
        return head(backbone()(x[own]), labels[own], 9).loss.item()


def as_rows(local, shard, size):
    """A process's rows as a part of those of all classes."""
    local, mesh = local.detach(), init_device_mesh("cpu", (size,))
    shape = torch.Size([shard.num_classes, *local.shape[1:]])
    return DTensor.from_local(
        local, mesh, [Sharded(0)], run_check=False, shape=shape, stride=local.stride()
    )


def forms(world=None, own=slice(None)):
    """Learned scale and bias, and weights, of 12 samples of 11 classes."""
    x, labels = batch(11, 4)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(8)) * 2
    world = world or World()
    results = {}
    for kind in ("mlcd", "mlc", "cd"):
        config = HeadConfig(
            kind=kind, scale=6.0, learn_scale=True, learn_bias=kind == "mlcd",
            negative_ratio=0.4, margin_grad="exact", seed=5,
        )  # fmt: skip
        for counted in (None, weights):
            results[f"{kind}-{counted is not None}"] = head_step(
                world,
                config,
                11,
                x[own],
                labels[own],
                weights=None if counted is None else counted[own],
            )
    return results


def save(rank, size, folder):
    """Two updates of the centers, then this process's rows and moments as a file, and the next
    loss.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-save", rank=rank, world_size=size
    )
    world = World.current()
    head = PartialFC(
        11, DIMENSION, HeadConfig(scale=16.0, negative_ratio=0.5), world=world
    ).double()
    head.initialize(7)
    optimizer = RowAdamW(head.parameters(), lr=0.01)
    x, labels = batch(11, 4)
    own = split(len(x), size)[rank]
    for step in range(2):
        optimizer.zero_grad()
        head(backbone()(x[own]).detach(), labels[own], step).loss.backward()
        optimizer.step()
    moments = optimizer.state[head.weight]
    rows = {
        name: as_rows(tensor, head.shard, size)
        for name, tensor in {"weight": head.weight, **moments}.items()
    }
    write_tensors(rows, Path(folder, "rows"), world.group)
    torch.save(
        {"weight": head.weight.detach(), "loss": resharded_loss(world, head.weight)},
        f"{folder}/saved-{rank}.pt",
    )
    dist.destroy_process_group()


def load(rank, size, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-load-{size}", rank=rank, world_size=size
    )
    world = World.current()
    shard, stored = Shard.of(rank, size, 11), read_tensor_sizes(Path(folder, "rows"))
    rows = {
        name: as_rows(torch.empty((len(shard), *shape[1:]), dtype=dtype), shard, size)
        for name, (shape, dtype) in stored.items()
    }
    read_tensors(rows, Path(folder, "rows"), world.group)
    rows = {name: tensor.to_local() for name, tensor in rows.items()}
    torch.save(
        {**rows, "loss": resharded_loss(world, rows["weight"])}, f"{folder}/loaded-{size}-{rank}.pt"
    )
    dist.destroy_process_group()


def run(rank, size, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{size}", rank=rank, world_size=size
    )
    world = World.current()
    results = {}
    for name, config, num_classes, num_labels in cases():
        x, labels = batch(num_classes, num_labels)
        own = split(len(x), size)[rank]
        results[name] = head_step(world, config, num_classes, x[own], labels[own])
    # Every label on the first class: the other processes own no positive.
    x, labels = batch(11, 3)
    own = split(len(x), size)[rank]
    one = torch.zeros_like(labels[own])
    results["one-owner"] = head_step(
        world, HeadConfig(scale=16.0, negative_ratio=1.0), 11, x[own], one
    )
    for accumulate in (1, 2, 4):
        # Equal parts, as the mean of means needs; micro-batch i of every process is the global
        # micro-batch i.
        x, labels = batch(11, 4, num=8 * size)
        rows = torch.arange(len(x)).view(4, size, 2)[:, rank].flatten()
        config = HeadConfig(scale=16.0, negative_ratio=0.4)
        results[f"accumulate-{accumulate}"] = head_step(
            world, config, 11, x[rows], labels[rows], accumulate=accumulate
        )
    x, _ = batch(3, 1)
    y, _ = batch(3, 1, seed=9)
    own = split(len(x), size)[rank]
    for kind in ("clip", "siglip"):
        results[kind] = contrastive_step(world, kind, x[own], y[own])
    results["clipping"] = clip_step(world)
    results |= forms(world, own)
    torch.save(results, f"{folder}/results-{size}-{rank}.pt")
    dist.destroy_process_group()
