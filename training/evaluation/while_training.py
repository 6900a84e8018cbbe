"""Evaluates a model during training by k-NN and the linear probe, on images of known class.

The run is not affected: weights and modules' modes stay the same, and no random numbers are drawn.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from mlcd.errors import ConfigInvalid
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.keys import HELD_OUT_FRACTION
from mlcd.models.servable import Servable
from mlcd.training.config import RunConfig
from mlcd.training.evaluation.knn import knn
from mlcd.training.evaluation.linear_probe import linear_probe
from mlcd.training.evaluation.representations import ImageSet, PreparedImages, encode_images
from mlcd.training.evaluation.splits import (
    check_probe_split,
    check_several_classes,
    check_tested_classes,
)
from mlcd.training.run.classification import Evaluate
from mlcd.world import World

NEIGHBORS: Final = 5  # the default of `mlcd evaluate knn`
# The share of data.memory_gib for the evaluation's images; the rest is for training images.
_MEMORY_SHARE: Final = 0.25


def open_evaluation(config: RunConfig, listings: Sequence[str]) -> Evaluate | None:
    """Opens the evaluation of a run; None if the run never evaluates.

    Raises the errors of `check_evaluation`.
    """
    images = check_evaluation(config, listings)
    return None if images is None else partial(evaluate_model, config=config, images=images)


def check_evaluation(
    config: RunConfig, listings: Sequence[str] | None = None
) -> PreparedImages | None:
    """Lists the images to evaluate on, not yet decoded; None if the run never evaluates.

    Reuse the result in every `evaluate_model` of the run: it caches decoded pixels if they fit in a
    quarter of data.memory_gib. listings: digests of the listings of the run's images; None computes
    them. Raises ConfigInvalid or InvalidInput if an evaluation would fail.
    """
    if config.evaluation.every_steps is None:
        return None
    if not (config.evaluation.knn or config.evaluation.linear_probe):
        raise ConfigInvalid(
            "evaluation.every_steps requires evaluation.knn or evaluation.linear_probe",
            remedy="set evaluation.knn=true or evaluation.linear_probe=true",
        )
    images = ImageSet.of(open_source(_location(config)))
    check_several_classes(images.class_names)
    hold_out = _hold_out(config)
    if images.own_split is not None and _are_training_images(images, config, listings):
        raise ConfigInvalid(
            f"the folders of {images.location} are splits, and the run is trained on all of them",
            remedy="train on one split, and set evaluation.images to the folder of all splits",
        )
    if config.data.hold_out < hold_out and _are_training_images(images, config, listings):
        raise ConfigInvalid(
            "evaluation.images are the training images, of which only "
            f"data.hold_out={config.data.hold_out:g} are held out",
            remedy=f"set data.hold_out={hold_out:g}, or evaluate on other images",
        )
    if hold_out == 0:
        raise ConfigInvalid(
            "data.hold_out=0 leaves no image to evaluate on",
            remedy="raise it, or set evaluation.images",
        )
    if images.own_split is not None:
        check_tested_classes(images.class_names, images.own_split)
    if config.evaluation.linear_probe:
        check_probe_split(images.class_names, images.split(hold_out))
    size = config.model.image_size
    spec = PreprocessSpec(resize_shortest=size, crop=size)
    return PreparedImages(images, spec, memory_bytes=_MEMORY_SHARE * config.data.memory_gib * 2**30)


def evaluate_model(
    model: Servable, config: RunConfig, *, world: World, images: PreparedImages | None = None
) -> dict[str, float]:
    """Returns {"knn": accuracy, "linear_probe": accuracy} on served embeddings, as set by
    evaluation.knn and evaluation.linear_probe.

    Every process calls it with the same weights and gets the same result, for any number of
    processes. images: result of `check_evaluation`; None lists and decodes them again.
    """
    images = images or check_evaluation(config)
    if images is None:
        raise ConfigInvalid(
            "evaluation.every_steps is not set", remedy="set it to evaluate while training"
        )
    with _evaluation_mode(model):
        samples = encode_images(model, images, features="embedding", world=world)
    hold_out = _hold_out(config)
    metrics: dict[str, float] = {}
    if config.evaluation.knn:
        measured = dict(knn(samples, neighbors=NEIGHBORS, hold_out=hold_out, world=world))
        metrics["knn"] = measured["knn_accuracy"]
    if config.evaluation.linear_probe:
        device = model.mean.device
        measured = dict(
            linear_probe(samples, hold_out=hold_out, metric="accuracy", world=world, device=device)
        )
        metrics["linear_probe"] = measured["linear_probe_accuracy"]
    return metrics


def _location(config: RunConfig) -> str:
    if config.evaluation.images is not None:
        return config.evaluation.images
    if len(config.data.sources) > 1:
        raise ConfigInvalid(
            "evaluation.images is not set, and the run has several data sets",
            remedy="set evaluation.images",
        )
    return config.data.sources[0].images


def _are_training_images(
    images: ImageSet, config: RunConfig, listings: Sequence[str] | None
) -> bool:
    """Returns True if the run is trained on these images."""
    if config.evaluation.images is None:
        return True
    if listings is None:
        listings = [open_source(mixed.images).listing_digest() for mixed in config.data.sources]
    return images.source.listing_digest() in listings


def _hold_out(config: RunConfig) -> float:
    """Returns the share to test on: data.hold_out, or the default for evaluation.images."""
    return config.data.hold_out if config.evaluation.images is None else HELD_OUT_FRACTION


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    training_modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True
