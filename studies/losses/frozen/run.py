"""One run of the frozen tier: clusters, a small network over fixed features, and every image asked.

Shapes: N images, D features, L labels.
"""

import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from studies.losses.frozen.arms import FeaturesRun, FrozenRun, Start
from studies.losses.frozen.features import Teacher
from studies.losses.instrument.asked import Asked, neighbors_right, probe
from studies.losses.instrument.heads import (
    FirstRows,
    HeadArm,
    clustered,
    embedded,
    nearest_labels,
    resting_cosines,
    scaled,
    train_head,
)
from studies.losses.instrument.rows import Outcome


def perform(run: FrozenRun | FeaturesRun, teacher: Teacher, state: Path) -> Outcome:
    """Trains and asks; the same run gives the same numbers on one kind of CPU with one thread."""
    if isinstance(run, FeaturesRun):
        return _asked_of(teacher)
    return perform_arm(run.arm, run.seed, teacher, state, run.arm.start)


def perform_arm(
    arm: HeadArm, seed: int, teacher: Teacher, state: Path, start: Start = "random"
) -> Outcome:
    """Trains an arm on a teacher's features, and asks all sets of the teacher."""
    began = time.perf_counter()
    path = state / "clusterings" / f"{teacher.name}-k{arm.clusters}-seed{seed}.npy"
    stored = torch.from_numpy(nearest_labels(teacher.training, arm.clusters, seed, path))
    labeled = time.perf_counter()
    rows_ND, labels_NL = scaled(teacher.training), stored[:, : arm.labels].contiguous()
    trained = train_head(rows_ND, labels_NL, arm, seed, _first_rows(start, arm, seed, teacher))
    ended = time.perf_counter()
    numbers = resting_cosines(trained, rows_ND, labels_NL)
    asked, right = ask(trained.network, teacher.asked)
    seconds = {
        "cluster_s": labeled - began,
        "train_s": ended - labeled,
        "evaluation_s": time.perf_counter() - ended,
    }
    return Outcome({**numbers, **asked, **seconds}, right)


def _first_rows(start: Start, arm: HeadArm, seed: int, teacher: Teacher) -> FirstRows:
    if start == "random":
        return FirstRows()
    centers = None
    if start == "centers":  # the same that gave the labels: they depend on rows and seed alone
        centers = clustered(teacher.training, arm.clusters, seed)
    return FirstRows(teacher.training.shape[1], centers)


def _asked_of(teacher: Teacher) -> Outcome:
    began = time.perf_counter()
    asked, right = ask(None, teacher.asked)
    return Outcome({**asked, "evaluation_s": time.perf_counter() - began}, right)


def ask(
    network: nn.Module | None, sets: tuple[Asked, ...]
) -> tuple[dict[str, float], NDArray[np.bool_]]:
    """Returns the accuracies of every set, and the bits of all of their images.

    network: None asks the features themselves.
    """
    numbers, right = {}, []
    for asked in sets:
        rows = asked.rows if network is None else embedded(network, asked.rows)
        right.append(neighbors_right(rows, asked))
        numbers[f"knn_{asked.name}"] = float(right[-1].mean())
        numbers[f"probe_{asked.name}"] = probe(rows, asked.classes)
    return numbers, np.concatenate(right)
