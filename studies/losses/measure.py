"""The measures of a representation: k-NN and linear probe on every task, mAP over attributes.

k-NN uses the embedding as served and 5 neighbors. The probes use the features before the
projection, as CLIP's protocol does. They choose C among powers of ten instead of CLIP's 96 steps:
the weakest penalties of these take minutes each on features of so small a tower, more than its
training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from mlcd.keys import HELD_OUT_FRACTION
from mlcd.models.servable import Servable
from mlcd.training.evaluation.knn import knn
from mlcd.training.evaluation.logistic_regression import LogisticRegression, PrincipalRows
from mlcd.training.evaluation.scores import score
from mlcd.training.evaluation.splits import LabeledRows, check_probe_split, split_samples
from mlcd.types import unit_rows
from studies.losses.multilabel_probe import best_c, multilabel_probe
from studies.losses.sets import FASHION, EvaluationSet, split_of

NEIGHBORS: Final = 5
_BATCH: Final = 256


@dataclass(frozen=True)
class Measurement:
    """One measured value.

    set: the images. task: the column of classes, or `attributes`. value: an accuracy, or a mean
    average precision.
    """

    set: str
    task: str
    metric: str
    value: float


@dataclass(frozen=True)
class Rows:
    """Both kinds of rows of a tower.

    embedding: unit rows [N, D], for neighbors. features: [N, F], for probes.
    """

    embedding: NDArray[np.float32]
    features: NDArray[np.float32]


@torch.no_grad()
def encode(model: Servable, pixels: NDArray[np.uint8]) -> Rows:
    """Returns both of a tower's outputs for uint8 [N, 3, S, S]."""
    model.eval()
    embeddings, pooled = [], []
    for start in range(0, len(pixels), _BATCH):
        batch = torch.from_numpy(np.array(pixels[start : start + _BATCH])).to(model.mean.device)
        features = model.embed(batch, "pooled")
        embeddings.append(
            normalize(model.trunk.get_submodule("proj")(features).float(), dim=1).cpu()
        )
        pooled.append(features.float().cpu())
    return Rows(torch.cat(embeddings).numpy(), torch.cat(pooled).numpy())


def encode_reference(rows: NDArray[np.float32], test: NDArray[np.bool_]) -> Rows:
    """Returns rows for features of another kind, less the mean of the known images."""
    return Rows(unit_rows(rows - rows[~test].mean(axis=0)), rows)


def measure_neighbors(images: EvaluationSet, rows: Rows) -> Iterator[Measurement]:
    for task in images.tasks:
        found = dict(
            knn(
                images.samples(task, rows.embedding),
                neighbors=NEIGHBORS,
                hold_out=HELD_OUT_FRACTION,
            )
        )
        yield Measurement(images.name, task, "knn", found["knn_accuracy"])


def measure(images: EvaluationSet, rows: Rows) -> Iterator[Measurement]:
    """Yields everything that can be measured on the set."""
    yield from measure_neighbors(images, rows)
    for task in images.tasks:
        yield Measurement(
            images.name, task, "linear_probe", linear_probe(images.samples(task, rows.features))
        )
    if images.name == FASHION:
        _, tags = images.tags()
        splits = split_of(images.keys, images.columns["gender"], images.test)
        found = dict(multilabel_probe(rows.features, tags, splits, hold_out=HELD_OUT_FRACTION))
        yield Measurement(images.name, "attributes", "map", found["multilabel_map"])


def measure_majority(images: EvaluationSet) -> Iterator[Measurement]:
    """Yields the values of a guess that looks at no image.

    The guess is the class that most known images have, and equal scores for every attribute, whose
    average precision is the share of test images that have it.
    """
    none = np.empty((len(images.keys), 0), np.float32)
    for task in images.tasks:
        samples = images.samples(task, none)
        test = split_samples(samples.splits, HELD_OUT_FRACTION).test
        most_frequent = np.bincount(samples.classes[~test]).argmax()
        value = float((samples.classes[test] == most_frequent).mean())
        yield Measurement(images.name, task, "knn", value)
        yield Measurement(images.name, task, "linear_probe", value)
    if images.name == FASHION:
        _, tags = images.tags()
        yield Measurement(images.name, "attributes", "map", float(tags[images.test].mean()))


def linear_probe(samples: LabeledRows) -> float:
    """Returns the accuracy of logistic regression on the test images.

    C is chosen on a fifth of the others; the model is then fitted to all of them.
    """
    split = split_samples(samples.splits, HELD_OUT_FRACTION)
    check_probe_split(samples.class_names, split)
    num_classes = len(set(samples.class_names))
    features, classes = (
        torch.from_numpy(samples.rows.astype(np.float64)),
        torch.from_numpy(samples.classes),
    )
    train, validation = torch.from_numpy(split.train), torch.from_numpy(split.validation)
    problem = LogisticRegression(PrincipalRows(features[train]), classes[train], num_classes)

    def scored(c: float) -> float:
        predicted = problem.fit(c).predict(features[validation])
        return score(predicted.numpy(), samples.classes[split.validation], "accuracy")

    best = best_c(scored)
    known = train | validation
    final = LogisticRegression(PrincipalRows(features[known]), classes[known], num_classes).fit(
        best
    )
    return score(
        final.predict(features[torch.from_numpy(split.test)]).numpy(),
        samples.classes[split.test],
        "accuracy",
    )
