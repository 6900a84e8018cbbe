"""Losses of pairs on cached features: photographs of products and their captions.

Shapes: N pairs, D features, B batch.
"""

import csv
import math
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mlcd.artifacts.disk import hold_lock
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.training.optim.clip import clip_global_norm
from mlcd.training.optim.groups import adamw_settings
from mlcd.training.optim.optim_config import OptimConfig
from mlcd.training.optim.schedule import learning_rate
from mlcd.types import Embeddings, unit_rows
from studies.losses.data import make
from studies.losses.frozen.features import Features
from studies.losses.instrument.heads import embedded, new_network, scaled
from studies.losses.instrument.rows import Outcome
from studies.losses.mosaics.tags import FASHION
from studies.losses.scales.arms import SCALES_TEACHER, PairArm
from studies.losses.scales.instance_head import InstanceHead

_TEXTS: Final = "starter"  # the model whose text tower is at hand without a network
_OTHER_TOWER: Final = 1 << 31  # added to the seed of the images' network
_PEAK: Final = 1e-3  # the learning rate at _BATCH_OF_PEAK; it grows with the root of the batch
_BATCH_OF_PEAK: Final = 512
_WARMUP: Final = 0.1  # of the steps
_MOMENTS: Final = 60  # of the curve of gradient norms: a step each at the largest batch
_OPTIM: Final = OptimConfig()


@dataclass(frozen=True)
class Pairs:
    """Pairs of a set: unit rows [N, D] of images and of texts, and which caption it is, [N]."""

    images: Embeddings
    texts: Embeddings
    captions: NDArray[np.int64]


@dataclass(frozen=True)
class PairedSet:
    """The pairs to train on, and others to find."""

    training: Pairs
    asked: Pairs


@lru_cache(maxsize=1)
def opened_pairs(features: Features, state: Path) -> PairedSet:
    """Opens the products and their captions, split as the set is; embeds what is not embedded."""
    with (features.data / FASHION / "labels.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    captions = [line["caption"] for line in lines]
    images = features.embed(SCALES_TEACHER, FASHION)
    row_of_key = {key: row for row, key in enumerate(images.keys)}
    image_rows = images.load()[[row_of_key[line["path"]] for line in lines]]
    text_rows = _embedded_texts(captions, state / "captions")
    trained = np.array([line["split"] == "train" for line in lines])
    numbers = np.unique(captions, return_inverse=True)[1]
    return split_pairs(image_rows, text_rows, numbers, trained)


def split_pairs(
    images: NDArray[np.float32],
    texts: NDArray[np.float32],
    captions: NDArray[np.int64],
    trained: NDArray[np.bool_],
) -> PairedSet:
    """Returns both parts, less the mean of the rows to train on."""
    centered = [unit_rows(rows - rows[trained].mean(axis=0)) for rows in (images, texts)]

    def part(chosen: NDArray[np.bool_]) -> Pairs:
        return Pairs(centered[0][chosen], centered[1][chosen], captions[chosen])

    return PairedSet(part(trained), part(~trained))


def _embedded_texts(captions: list[str], folder: Path) -> NDArray[np.float32]:
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder / ".making"):
        listed, out = folder / "captions.txt", folder / "embeddings"
        listed.write_text("".join(f"{caption}\n" for caption in captions))
        make(out, "embed", listed, out, "--texts", "--model", _TEXTS)
    return EmbeddingsArtifact.open(out).load()


def perform_pairs(arm: PairArm, seed: int, pairs: PairedSet) -> Outcome:
    """Trains two small networks, and asks each for the other's row of the pairs not seen.

    The bits are those of the images, then of the texts: the nearest has the same caption.
    """
    began = time.perf_counter()
    networks, numbers = _trained(arm, seed, pairs.training)
    ended = time.perf_counter()
    asked = pairs.asked
    images, texts = (
        embedded(network, rows)
        for network, rows in zip(networks, (asked.images, asked.texts), strict=True)
    )
    cosines = images @ texts.T
    found = [each.argmax(axis=1) for each in (cosines, cosines.T)]
    right = [asked.captions[each] == asked.captions for each in found]
    numbers |= {
        "recall_texts": float(right[0].mean()),
        "recall_images": float(right[1].mean()),
        "retrieval": float(np.mean(right)),
        "train_s": ended - began,
        "evaluation_s": time.perf_counter() - ended,
    }
    return Outcome(numbers, np.concatenate(right))


def _trained(
    arm: PairArm, seed: int, pairs: Pairs
) -> tuple[tuple[nn.Module, nn.Module], dict[str, Any]]:
    networks = (
        new_network(pairs.images.shape[1], seed),
        new_network(pairs.texts.shape[1], seed + _OTHER_TOWER),
    )
    head = InstanceHead(arm.head)
    weights = [parameter for network in networks for parameter in network.parameters()]
    scalars = list(head.scalars.values())
    optimizer = torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": _OPTIM.weight_decay, "times": 1.0},
            {"params": scalars, "weight_decay": 0.0, "times": arm.scalar_rate},
        ],
        **adamw_settings(_OPTIM),
    )
    rows = scaled(pairs.images), scaled(pairs.texts)
    peak = _PEAK * math.sqrt(arm.batch / _BATCH_OF_PEAK)
    norms, meters = [], {}
    for step, chosen in enumerate(_batches(len(pairs.images), arm, seed)):
        rate = learning_rate(
            step, peak=peak, warmup_steps=int(_WARMUP * arm.steps), num_steps=arm.steps
        )
        for group in optimizer.param_groups:
            group["lr"] = rate * group["times"]
        optimizer.zero_grad()
        output = head(
            *(network(part[chosen]) for network, part in zip(networks, rows, strict=True))
        )
        output.loss.backward()
        parameters = [*weights, *scalars]
        norm, _ = clip_global_norm(parameters, [], _OPTIM.clip_norm or math.inf, head.world)
        optimizer.step()
        head.limit()
        norms.append(float(norm))
        meters = {"loss": output.loss.detach(), **output.meters}
    numbers = {f"end_{name}": float(each) for name, each in meters.items()}
    return (networks[0].eval(), networks[1].eval()), numbers | norms_over_time(norms)


def norms_over_time(norms: list[float]) -> dict[str, Any]:
    """Returns the mean and the largest gradient norm, before clipping, of equal parts of a run."""
    parts = np.array_split(np.array(norms), min(_MOMENTS, len(norms)))
    return {
        "gradient_norms": [float(part.mean()) for part in parts],
        "gradient_peaks": [float(part.max()) for part in parts],
        "gradient_norm": float(np.mean(norms)),
    }


def _batches(num: int, arm: PairArm, seed: int) -> torch.Tensor:
    """Returns [steps, B] pairs: whole batches of one order after the other."""
    order = np.random.default_rng(seed)
    each = num // arm.batch
    shuffled = [
        order.permutation(num)[: each * arm.batch].reshape(each, arm.batch)
        for _ in range(-(-arm.steps // each))
    ]
    return torch.from_numpy(np.concatenate(shuffled)[: arm.steps])
