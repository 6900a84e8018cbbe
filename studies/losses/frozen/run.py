"""One run of the frozen tier: clusters, a small network over fixed features, and every image asked.

Shapes: N images, D features, E embedding, B batch, L labels, K classes.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from mlcd.clustering.kmeans import kmeans
from mlcd.clustering.nearest import nearest_centers
from mlcd.types import Embeddings, unit_rows
from studies.losses.frozen.arms import Arm, FrozenRun
from studies.losses.frozen.features import Asked, Teacher
from training.config import OptimConfig
from training.evaluation.knn import weighted_votes
from training.optim.clip import clip_global_norm
from training.optim.groups import adamw_settings, center_optimizer, scalar_groups
from training.optim.row_gradients import add_up
from training.optim.schedule import learning_rate
from training.parallel.partial_fc import HeadConfig, PartialFC

_BATCH: Final = 128
_WIDTH: Final = 256
_DIMENSION: Final = 128
_MOST_LABELS: Final = 32
_ITERATIONS: Final = 10  # of k-means
_NEIGHBORS: Final = 5
_MEASURED: Final = 2048  # training images whose cosines are measured at the end
_PENALTIES: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the probe, times the number of images
_OPTIM: Final = OptimConfig(warmup_steps=30)  # the rest is that of the recipes


@dataclass(frozen=True)
class Outcome:
    """The numbers of a run by name, and a bit for each asked image: the nearest neighbors were
    right.
    """

    numbers: dict[str, float]
    right: NDArray[np.bool_]


def perform(run: FrozenRun, teacher: Teacher, state: Path) -> Outcome:
    """Trains and asks; the same run gives the same numbers on one kind of CPU with one thread."""
    began = time.perf_counter()
    labels_NL = torch.from_numpy(labels_of(teacher, run.arm.clusters, run.seed, state))
    clustered = time.perf_counter()
    rows_ND = torch.from_numpy(teacher.training) * teacher.training.shape[1] ** 0.5
    network, head = _trained(rows_ND, labels_NL[:, : run.arm.labels].contiguous(), run)
    trained = time.perf_counter()
    numbers = _cosines(network, head, rows_ND, labels_NL[:, : run.arm.labels])
    right = []
    for asked in teacher.asked:
        rows = _embedded(network, asked.rows)
        right.append(_neighbors_right(rows, asked))
        numbers[f"knn_{asked.name}"] = float(right[-1].mean())
        numbers[f"probe_{asked.name}"] = probe(rows, asked.classes)
    numbers |= {
        "cluster_s": clustered - began,
        "train_s": trained - clustered,
        "evaluation_s": time.perf_counter() - trained,
    }
    return Outcome(numbers, np.concatenate(right))


def labels_of(teacher: Teacher, clusters: int, seed: int, state: Path) -> NDArray[np.int64]:
    """Returns the nearest centers of each training image, [N, 32] or fewer, nearest first.

    The clustering of a seed is made once and kept.
    """
    path = state / "clusterings" / f"{teacher.name}-k{clusters}-seed{seed}.npy"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        found = kmeans([teacher.training], clusters, iterations=_ITERATIONS, seed=seed)
        top = min(_MOST_LABELS, clusters)
        ids = nearest_centers(teacher.training, found.centers, top=top).ids
        written = path.with_name(f"{path.stem}-{time.time_ns()}.partial.npy")
        np.save(written, ids, allow_pickle=False)
        written.rename(path)
    labels: NDArray[np.int64] = np.load(path, allow_pickle=False).astype(np.int64)
    return labels


def _trained(rows_ND: Tensor, labels_NL: Tensor, run: FrozenRun) -> tuple[nn.Module, PartialFC]:
    network = _network(rows_ND.shape[1], run.seed)
    head = PartialFC(run.arm.clusters, _DIMENSION, _head_config(run.arm, run.seed))
    head.initialize(run.seed)
    groups = [
        {"params": list(network.parameters()), "weight_decay": _OPTIM.weight_decay,
         "peak_lr": _OPTIM.lr},
        *scalar_groups(head, _OPTIM),
    ]  # fmt: skip
    optimizers = [
        torch.optim.AdamW(groups, **adamw_settings(_OPTIM)),
        center_optimizer(head, _OPTIM),
    ]
    order, steps = np.random.default_rng(run.seed), run.arm.steps
    batches = np.concatenate(
        [order.permutation(len(rows_ND)) for _ in range(-(-steps * _BATCH // len(rows_ND)))]
    )
    for step in range(steps):
        chosen = torch.from_numpy(batches[step * _BATCH : (step + 1) * _BATCH])
        _update(network, head, optimizers, rows_ND[chosen], labels_NL[chosen], step, steps)
    return network.eval(), head


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
    if head.config.kind == "per_column":
        add_up(head.weight)
    replicated = [*network.parameters(), *head.scalars.values()]
    clip_global_norm(replicated, [head.weight], _OPTIM.clip_norm or float("inf"), head.world)
    for optimizer in optimizers:
        optimizer.step()


def _network(num_features: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(num_features, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _DIMENSION)
        )


def _head_config(arm: Arm, seed: int) -> HeadConfig:
    return HeadConfig(
        kind=arm.kind,
        scale=arm.scale,
        margin=arm.margin,
        bias=arm.first_bias,
        learn_scale=arm.learned,
        learn_bias=arm.learned and arm.kind == "mlcd",
        negative_ratio=arm.ratio,
        seed=seed,
    )


@torch.no_grad()
def _cosines(
    network: nn.Module, head: PartialFC, rows_ND: Tensor, labels_NL: Tensor
) -> dict[str, float]:
    """Returns the mean cosine with own labels and with all other classes, and what was learned."""
    z = normalize(network(rows_ND[:_MEASURED]), dim=1)
    cosines = z @ head.unit_centers().T
    own = torch.zeros_like(cosines, dtype=torch.bool)
    own.scatter_(1, labels_NL[:_MEASURED], value=True)
    learned = {name: float(each) for name, each in head.scalars.items()}
    found = {"positive_cosine": float(cosines[own].mean())}
    return found | {"negative_cosine": float(cosines[~own].mean()), **learned}


@torch.no_grad()
def _embedded(network: nn.Module, rows: Embeddings) -> Embeddings:
    scaled = torch.from_numpy(rows) * rows.shape[1] ** 0.5
    return unit_rows(network(scaled).numpy())


def _neighbors_right(rows: Embeddings, asked: Asked) -> NDArray[np.bool_]:
    """Returns for each image whether its five nearest others vote for its class."""
    votes = weighted_votes(
        rows,
        rows,
        asked.classes,
        num_classes=int(asked.classes.max()) + 1,
        neighbors=_NEIGHBORS,
        itself=np.arange(len(rows)),
    )
    right: NDArray[np.bool_] = votes.argmax(axis=1) == asked.classes
    return right


def probe(rows: Embeddings, classes: NDArray[np.int64]) -> float:
    """Returns the leave-one-out accuracy of ridge regression on one-hot classes, at the best of
    five penalties.

    The prediction for an image that the regression did not see is (y^ - h y) / (1 - h), h its
    leverage.
    """
    centered = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    targets = np.eye(int(classes.max()) + 1)[classes]
    shares = targets.mean(axis=0)
    targets -= shares
    values, directions = np.linalg.eigh(centered.T @ centered)
    along = centered @ directions
    found = []
    for penalty in _PENALTIES:
        shrunk = along / (np.maximum(values, 0) + penalty * len(rows))
        leverage = (shrunk * along).sum(axis=1)[:, None] + 1 / len(rows)
        fitted = shrunk @ (along.T @ targets)
        unseen = (fitted - leverage * targets) / (1 - leverage)
        found.append(float(((unseen + shares).argmax(axis=1) == classes).mean()))
    return max(found)
