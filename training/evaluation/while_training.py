"""k-NN and the linear probe of a model in training, on images of known class.

Nothing else of the run changes: weights, modes of modules and random numbers stay, because nothing
here draws any.
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
# The share of data.memory_gib for evaluation; most of it is for the training images.
_MEMORY_SHARE: Final = 0.25


def open_evaluation(config: RunConfig, listings: Sequence[str]) -> Evaluate | None:
    """Opens the evaluation of a run, as `check_evaluation` does; None if the run never evaluates.

    Decoded pixels are kept over the run if they fit.
    """
    images = check_evaluation(config, listings)
    return None if images is None else partial(evaluate_model, config=config, images=images)


def check_evaluation(
    config: RunConfig, listings: Sequence[str] | None = None
) -> PreparedImages | None:
    """Lists the images to evaluate on, not yet decoded; None if the run never evaluates.

    listings: the digests of the listings of the run's images, where they are known.

    Keep the result over the run and pass it to `evaluate_model`: it keeps decoded pixels if they
    fit into a quarter of data.memory_gib. Raises ConfigInvalid or InvalidInput if an evaluation
    would fail.
    """
    if config.evaluation.every_steps is None:
        return None
    if not (config.evaluation.knn or config.evaluation.linear_probe):
        raise ConfigInvalid(
            "evaluation.every_steps is set, but nothing is to be measured",
            remedy="set evaluation.knn=true or evaluation.linear_probe=true",
        )
    images = ImageSet.of(open_source(_location(config)))
    check_several_classes(images.class_names)
    hold_out = _hold_out(config)
    if images.own_split is not None and _are_own(images, config, listings):
        raise ConfigInvalid(
            f"the folders of {images.location} are splits, and the run is trained on all of them",
            remedy="train on one of them, and set evaluation.images to the folder of all",
        )
    if config.data.hold_out < hold_out and _are_own(images, config, listings):
        raise ConfigInvalid(
            "evaluation.images are those that the run is trained on, with "
            f"data.hold_out={config.data.hold_out:g}",
            remedy=f"set data.hold_out={hold_out:g}, or give others",
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
    """Returns {"knn": accuracy, "linear_probe": accuracy} on embeddings as they are served.

    It has the metrics that evaluation.* asks for. Every process calls it with the same weights; all
    get the same numbers, whatever their number. images: the result of `check_evaluation`; without
    it they are listed and decoded again.
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


def _are_own(images: ImageSet, config: RunConfig, listings: Sequence[str] | None) -> bool:
    """Tells if the run is trained on these very images."""
    if config.evaluation.images is None:
        return True
    if listings is None:
        listings = [open_source(mixed.images).listing_digest() for mixed in config.data.sources]
    return images.source.listing_digest() in listings


def _hold_out(config: RunConfig) -> float:
    """Returns the share to test on: the run's own, or the default for other images."""
    return config.data.hold_out if config.evaluation.images is None else HELD_OUT_FRACTION


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
