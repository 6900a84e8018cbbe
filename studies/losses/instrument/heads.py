"""A small network over fixed features, trained by a loss of classes.

Shapes: N images, D features, B batch, L labels, K classes.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_centers
from mlcd.training.head.partial_fc import HeadConfig, PartialFC
from mlcd.training.head.row_adamw import center_optimizer
from mlcd.training.optim.clip import clip_global_norm
from mlcd.training.optim.groups import adamw_settings, scalar_groups
from mlcd.training.optim.optim_config import OptimConfig
from mlcd.training.optim.schedule import learning_rate
from mlcd.types import Embeddings, unit_rows

DIMENSION: Final = 128
_BATCH: Final = 128
_WIDTH: Final = 256
_MOST_LABELS: Final = 32
_ITERATIONS: Final = 10  # of k-means
_MEASURED: Final = 2048  # training images whose cosines are measured at the end
_OPTIM: Final = OptimConfig(warmup_steps=30)  # the rest is that of the recipes


class HeadArm(Protocol):
    """The settings that decide a training besides its features and its seed."""

    @property
    def labels(self) -> int: ...

    @property
    def clusters(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def rate(self) -> float:
        """Returns the learning rate, times that of the recipes."""
        ...

    @property
    def scalar_rate(self) -> float:
        """Returns the rate of a learned scale and bias, times that of the centers."""
        ...

    def head(self, seed: int) -> HeadConfig: ...


@dataclass(frozen=True)
class FirstRows:
    """How a classifier starts: random rows of a dimension, or k-means centers [K, dimension]."""

    dimension: int = DIMENSION
    centers: Embeddings | None = None


_RANDOM: Final = FirstRows()


@dataclass(frozen=True)
class TrainedHead:
    """The network and the classifier after the last step."""

    network: nn.Module
    head: PartialFC


def nearest_labels(rows: Embeddings, clusters: int, seed: int, path: Path) -> NDArray[np.int64]:
    """Returns the nearest centers of each row, [N, 32] or fewer, nearest first.

    path: the clustering is made once and kept there.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        top = min(_MOST_LABELS, clusters)
        ids = nearest_centers(rows, clustered(rows, clusters, seed), top=top).ids
        written = path.with_name(f"{path.stem}-{time.time_ns()}.partial.npy")
        np.save(written, ids, allow_pickle=False)
        written.rename(path)
    labels: NDArray[np.int64] = np.load(path, allow_pickle=False).astype(np.int64)
    return labels


def clustered(rows: Embeddings, clusters: int, seed: int) -> Embeddings:
    """Returns the centers of a clustering, unit rows [K, D]."""
    return kmeans([rows], clusters, iterations=_ITERATIONS, seed=seed).centers


def scaled(rows: Embeddings) -> Tensor:
    """Returns unit rows as the network takes them: their entries have a variance of about 1."""
    return torch.from_numpy(rows).mul(math.sqrt(rows.shape[1]))


def train_head(
    rows_ND: Tensor, labels_NL: Tensor, arm: HeadArm, seed: int, first: FirstRows = _RANDOM
) -> TrainedHead:
    """Trains on scaled rows; the same arguments give the same bits with one thread."""
    network = new_network(rows_ND.shape[1], seed, first.dimension)
    head = PartialFC(arm.clusters, first.dimension, arm.head(seed))
    if first.centers is None:
        head.initialize(seed)
    else:
        head.initialize_from(first.centers)
    optim = OptimConfig(lr=_OPTIM.lr * arm.rate, warmup_steps=_OPTIM.warmup_steps)
    groups = [
        {"params": list(network.parameters()), "weight_decay": optim.weight_decay,
         "peak_lr": optim.lr},
        *(
            {**group, "peak_lr": group["peak_lr"] * arm.scalar_rate}
            for group in scalar_groups(head.scalars, optim)
        ),
    ]  # fmt: skip
    optimizers = [
        torch.optim.AdamW(groups, **adamw_settings(optim)),
        center_optimizer(head, optim),
    ]
    order, steps = np.random.default_rng(seed), arm.steps
    batches = np.concatenate(
        [order.permutation(len(rows_ND)) for _ in range(-(-steps * _BATCH // len(rows_ND)))]
    )
    for step in range(steps):
        chosen = torch.from_numpy(batches[step * _BATCH : (step + 1) * _BATCH])
        _update(network, head, optimizers, rows_ND[chosen], labels_NL[chosen], step, steps)
    return TrainedHead(network.eval(), head)


def _update(
    network: nn.Module,
    head: PartialFC,
    optimizers: list[torch.optim.Optimizer],
    rows_BD: Tensor,
    labels_BL: Tensor,
    step: int,
    num_steps: int,
) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step, peak=group["peak_lr"], warmup_steps=_OPTIM.warmup_steps, num_steps=num_steps
            )
    head(network(rows_BD), labels_BL, step).loss.backward()
    replicated = [*network.parameters(), *head.scalars.values()]
    clip_global_norm(replicated, [head.weight], _OPTIM.clip_norm or float("inf"), head.world)
    for optimizer in optimizers:
        optimizer.step()


def new_network(num_features: int, seed: int, dimension: int = DIMENSION) -> nn.Sequential:
    """Returns the network of a seed before its first step."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(num_features, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, dimension)
        )


@torch.no_grad()
def resting_cosines(trained: TrainedHead, rows_ND: Tensor, labels_NL: Tensor) -> dict[str, float]:
    """Returns the mean cosine with own labels and with all other classes, and what was learned."""
    head = trained.head
    z = normalize(trained.network(rows_ND[:_MEASURED]), dim=1)
    cosines = z @ head.unit_centers().T
    own = torch.zeros_like(cosines, dtype=torch.bool)
    own.scatter_(1, labels_NL[:_MEASURED], value=True)
    learned = {f"end_{name}": float(each) for name, each in head.scalars.items()}
    found = {"positive_cosine": float(cosines[own].mean())}
    return found | {"negative_cosine": float(cosines[~own].mean()), **learned}


@torch.no_grad()
def embedded(network: nn.Module, rows: Embeddings) -> Embeddings:
    """Returns the network's unit rows for unit rows."""
    return unit_rows(network(scaled(rows)).numpy())
