"""One run of the mosaics tier: clusters of mosaics, a small network, and every image asked.

Shapes: N pictures, L labels, K clusters, C classes.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from studies.losses.frozen.run import ask
from studies.losses.instrument.asked import Asked, AskedTags, mean_precision, tags_right
from studies.losses.instrument.heads import (
    embedded,
    nearest_labels,
    resting_cosines,
    scaled,
    train_head,
)
from studies.losses.instrument.rows import Outcome
from studies.losses.mosaics.arms import MosaicRun
from studies.losses.mosaics.tiles import MosaicTeacher


def perform_mosaic(
    run: MosaicRun,
    teacher: MosaicTeacher,
    singles: tuple[Asked, ...],
    tagged: Sequence[AskedTags],
    state: Path,
) -> Outcome:
    """Trains on mosaics, and asks single photographs, mosaics and real pictures with several tags.

    The bits are those of the single photographs, then of the mosaics' objects.
    """
    began = time.perf_counter()
    stem = f"{teacher.name}-objects{run.objects}-k{run.arm.clusters}-seed{run.seed}"
    path = state / "clusterings" / f"{stem}.npy"
    stored_NL = nearest_labels(teacher.training, run.arm.clusters, run.seed, path)
    clustered = time.perf_counter()
    rows_ND = scaled(teacher.training)
    labels_NL = torch.from_numpy(stored_NL[:, : run.arm.labels]).contiguous()
    trained = train_head(rows_ND, labels_NL, run.arm, run.seed)
    ended = time.perf_counter()
    numbers = resting_cosines(trained, rows_ND, labels_NL)
    numbers |= covariates(stored_NL, teacher.tags, run.arm.clusters, run.arm.labels)
    asked, right = ask(trained.network, singles)
    bits = [right]
    for each in teacher.asked:
        bits.append(tags_right(embedded(trained.network, each.rows), each))
        numbers[each.name] = float(bits[-1].mean())
    for each in tagged:
        numbers[f"map_{each.name}"] = mean_precision(embedded(trained.network, each.rows), each)
    seconds = {
        "cluster_s": clustered - began,
        "train_s": ended - clustered,
        "evaluation_s": time.perf_counter() - ended,
    }
    return Outcome({**numbers, **asked, **seconds}, np.concatenate(bits))


def covariates(
    stored_NL: NDArray[np.int64], tags_NC: NDArray[np.bool_], clusters: int, labels: int
) -> dict[str, float]:
    """Returns what the labels of a clustering are worth, by the classes that nobody trains with.

    A cluster stands for the class that most of its pictures have, in which each has it nearest.
    purity: the share of pictures that have their nearest cluster's class. label_purity: the same
    share of all of their labels. conflict: the share of their negatives that stand for a class that
    they have.
    """
    counts_KC = np.zeros((clusters, tags_NC.shape[1]))
    np.add.at(counts_KC, stored_NL[:, 0], tags_NC)
    class_of_K = counts_KC.argmax(axis=1)
    own_NK = tags_NC[:, class_of_K] & (counts_KC.sum(axis=1) > 0)
    matching_NL = np.take_along_axis(own_NK, stored_NL[:, :labels], axis=1)
    conflicts = own_NK.sum(axis=1) - matching_NL.sum(axis=1)
    return {
        "purity": float(matching_NL[:, 0].mean()),
        "label_purity": float(matching_NL.mean()),
        "conflict": float(conflicts.mean() / (clusters - labels)),
    }
