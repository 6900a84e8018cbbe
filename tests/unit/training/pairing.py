"""Tiny runs on digits with captions, and the work of a process in the distributed tests."""

import contextlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mlcd.images.transform import PreprocessSpec
from mlcd.losses.contrastive import clip_loss, siglip_loss
from mlcd.models.servable import Servable
from mlcd.models.text import TextTower
from mlcd.models.vit import ViT
from mlcd.training.pairs.pair_batches import PairBatch
from mlcd.training.pairs.pairs_config import validate_any
from mlcd.training.pairs.pairs_state import initial_state
from mlcd.training.pairs.pairs_step import backward, pair_step
from mlcd.training.processes import Processes
from mlcd.world import World
from tests.conftest import write_digits
from tests.open_clip_files import open_clip_module

NUM_IMAGES = 40
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FIELDS = {
    "data": {"pairs": "PAIRS"},
    "model": {
        "image_size": 16,
        "patch_size": 8,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "mlp_width": 32,
        "embedding_dim": 12,
    },
    "text": {"width": 16, "depth": 1, "heads": 2, "context_length": 12},
    "schedule": {"steps": 6, "batch_size": 8},
    "optim": {"warmup_steps": 1},
    "checkpoint": {"every_steps": 2},
    "telemetry": {"peak_tflops": 1, "keys": True},
    "num_threads": 1,
    "log_every": 1,
    "device": "cpu",
}


def write_pairs(folder: Path) -> Path:
    """40 digits with one or two captions each, but for the last, which has none."""
    write_digits(folder, NUM_IMAGES)
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*.png"))
    lines = []
    for number, path in enumerate(paths[:-1]):
        name = path.parent.name
        texts = [f"a photo of the digit {WORDS[int(name)]}", f"{name}, from {path.stem}"]
        lines.append({"path": path.as_posix(), "captions": texts[: 1 + number % 2]})
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def pairs_config(out, pairs="PAIRS", *, kind="clip", **sections):
    fields = {**FIELDS, "out": str(out), "loss": {"kind": kind}}
    fields["data"] = {"pairs": str(pairs)}
    for name, changes in sections.items():
        given = {} if name == "text" else fields.get(name, {})
        fields[name] = {**given, **changes} if isinstance(changes, dict) else changes
    return validate_any(fields)


def new_state(config, world):
    """Two random towers and scalars in float64."""
    trunk = ViT(config.model.vit())
    trunk.initialize(torch.Generator().manual_seed(0))
    size = config.model.image_size
    model = Servable(trunk, PreprocessSpec(resize_shortest=size, crop=size))
    sizes = {"vocab_size": 50, "eos_token_id": 49, "embedding_dim": config.model.output_dim}
    text = TextTower(config.text.tower(**sizes))
    text.initialize(torch.Generator().manual_seed(1))
    scalars = {"log_scale": 2.0} | ({"bias": -1.5} if config.loss.kind == "siglip" else {})
    return initial_state(config, Processes(world, torch.device("cpu")), model, text, scalars)


def random_batch(num=10, side=16):
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (num, 3, side, side), generator=generator, dtype=torch.uint8)
    ids = torch.randint(0, 49, (num, 9), generator=generator)
    ids[torch.arange(num), torch.randint(1, 9, (num,), generator=generator)] = 49
    return PairBatch(images, ids, np.arange(num), tuple(map(str, range(num))))


def rows(batch, start, stop):
    part = slice(start, stop)
    return PairBatch(batch.images[part], batch.ids[part], batch.positions[part], batch.keys[part])


def gradients(world, kind, cuts):
    """Loss and gradients of the batch, of which this process has the micro-batches between cuts."""
    config = pairs_config("RUN", kind=kind, compute={"precision": "fp64"})
    state = new_state(config, world)
    batch = random_batch()
    parts = [rows(batch, start, stop) for start, stop in cuts]
    loss, values = backward(state, parts, len(batch.keys), config)
    found = {name: parameter.grad.clone() for name, parameter in state.iterate_trained()}
    pair_step(state, parts, len(batch.keys), config)
    after = {f"after.{name}": each.detach() for name, each in state.iterate_trained()}
    return {"loss": loss, **values, **found, **after}


# The micro-batches of each process: processes have unequal shares, and one has nothing of one.
CUTS = {
    1: {"whole": [[(0, 10)]], "accumulated": [[(0, 4), (4, 4), (4, 10)]]},
    2: {"whole": [[(0, 3)], [(3, 10)]], "accumulated": [[(0, 3), (5, 5)], [(3, 5), (5, 10)]]},
    3: {
        "whole": [[(0, 5)], [(5, 5)], [(5, 10)]],
        "accumulated": [[(0, 3), (4, 6)], [(3, 4), (6, 9)], [(4, 4), (9, 10)]],
    },
}
KINDS = ("clip", "siglip")
# Every way in which open_clip computes its losses with distributed gradients on.
OPEN_CLIP = {
    "clip": ({"local_loss": True}, {"local_loss": False}),
    "siglip": tuple({"dist_impl": name} for name in ("bidir", "shift", "reduce", "gather")),
}


def of_rows(world, compute, kind):
    """The loss, and its gradients as data parallelism averages them, by the rows of this process's
    two pairs and by the scalars.
    """
    generator = torch.Generator().manual_seed(3)
    every = torch.randn((2, 2 * world.size, 5), generator=generator, dtype=torch.float64)
    own = torch.nn.functional.normalize(every, dim=2)[:, 2 * world.rank : 2 * world.rank + 2]
    images, texts = (side.clone().requires_grad_() for side in own)
    scalars = [torch.tensor(9.0).double(), torch.tensor(-4.0).double()][: 1 + (kind == "siglip")]
    scalars = [each.requires_grad_() for each in scalars]
    loss = compute(images, texts, *scalars)
    loss.backward()
    means = [world.sum(each) / world.size for each in (loss, *(each.grad for each in scalars))]
    return [images.grad / world.size, texts.grad / world.size, *means]


def beside_open_clip(world, losses):
    """Our numbers, and open_clip's in each of its ways, of both losses."""
    theirs = {"clip": losses.ClipLoss, "siglip": losses.SigLipLoss}
    found = {}
    for kind, ours in (("clip", clip_loss), ("siglip", siglip_loss)):
        found[kind] = [of_rows(world, partial(ours, world=world), kind)]
        for way in OPEN_CLIP[kind]:
            more = {"gather_with_grad": True} if kind == "clip" else {}
            loss = theirs[kind](rank=world.rank, world_size=world.size, **way, **more)
            found[kind].append(of_rows(world, loss, kind))
    return found


def run(rank, size, folder):
    """The work of one of three processes, of which one, two and all compute the same."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    torch.set_num_threads(1)
    found = {}
    for number, forms in CUTS.items():
        group = dist.new_group(list(range(number)))
        if rank < number:
            world = World(rank, number, group)
            for form, cuts in forms.items():
                for kind in KINDS:
                    found[number, form, kind] = gradients(world, kind, cuts[rank])
    with contextlib.suppress(pytest.skip.Exception):
        losses = open_clip_module("loss")
        found["open_clip"] = beside_open_clip(World.current(), losses)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
