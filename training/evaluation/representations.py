"""What evaluators look at: rows with keys and classes, from an embeddings artifact or by encoding images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mlcd.artifact import MANIFEST, Artifact, open_artifact
from mlcd.embeddings import EmbeddingsArtifact
from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.models.runs import find_checkpoint, refuse_unfinished, trained_images
from mlcd.models.servable import Servable
from mlcd.types import SampleKey
from mlcd.world import World
from training.evaluation.encoding import Features, ImageSet, PreparedImages, encode


@dataclass(frozen=True)
class LabeledRows:
    """rows: float32 [N, D], finite; keys, splits (see mlcd.keys) and class_names: N. The same in every process."""

    rows: NDArray[np.float32]
    keys: Sequence[SampleKey]
    splits: NDArray[np.float64]
    class_names: Sequence[str]

    @cached_property
    def classes(self) -> NDArray[np.int64]:
        """int64 [N]: the place of each sample's class among the sorted names."""
        _, classes = np.unique(np.asarray(self.class_names), return_inverse=True)
        return classes.astype(np.int64)

    def __post_init__(self) -> None:
        finite = np.isfinite(self.rows.sum(axis=1, dtype=np.float64))
        if not finite.all():
            raise InvalidInput(
                f"the features of {self.keys[int(np.flatnonzero(~finite)[0])]} hold NaN or Inf "
                f"({int((~finite).sum())} of {len(finite)} images)",
                remedy="has the model diverged?",
            )


@dataclass(frozen=True)
class Representation:
    """The samples as one artifact represents them. digest: the artifact's."""

    digest: str
    samples: LabeledRows


def locate(path: Path) -> Artifact:
    """The embeddings artifact, checkpoint, or newest checkpoint of the run at `path`, not yet verified in full."""
    refuse_unfinished(path)
    if not path.is_dir():
        raise NotFound(f"{path} does not exist", remedy="give checkpoints, runs or embeddings artifacts")
    if (path / MANIFEST).is_file():
        artifact = open_artifact(path, verify_files=False)
        if artifact.kind == "embeddings":
            return artifact
    return open_artifact(find_checkpoint(path), "checkpoint", verify_files=False)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many more of them as tell all the places apart."""
    places = [path.resolve() for path in paths]
    depth = 1
    while len({place.parts[-depth:] for place in places}) < len(set(places)):
        depth += 1
    return ["/".join(place.parts[-depth:]) for place in places]


def open_representation(
    artifact: Artifact,
    *,
    images: str | None = None,
    features: Features = "embedding",
    world: World | None = None,
    device: torch.device | None = None,
    on_image: Callable[[], None] = lambda: None,
) -> Representation:
    """An embeddings artifact as it is; a checkpoint by encoding `images` (default: the run's own).

    Every process encodes its share of the images, on `device` (default: the CPU); all get all rows.
    """
    if artifact.kind == "embeddings":
        return Representation(artifact.digest, _stored(EmbeddingsArtifact.open(artifact.path), features))
    open_artifact(artifact.path, verify_files=True)
    model = Servable.read(artifact.path / "weights").to(device or torch.device("cpu"))
    prepared = PreparedImages(ImageSet.of(images_of(artifact, images)), model.preprocess)
    samples = encoded(model, prepared, features=features, world=world or World(), on_image=on_image)
    return Representation(artifact.digest, samples)


def images_of(artifact: Artifact, images: str | None) -> Source:
    """The images that a checkpoint is evaluated on: those given, or those it was trained on."""
    location = images or trained_images(artifact)
    if location is None:
        raise NotFound(f"the images of {artifact.path} are not where they were", remedy="give them with --images")
    return open_source(location)


def encoded(
    model: Servable,
    prepared: PreparedImages,
    *,
    features: Features,
    world: World,
    on_image: Callable[[], None] = lambda: None,
) -> LabeledRows:
    """The images that can be decoded, as the model represents them."""
    rows, usable = encode(model, prepared, features=features, world=world, on_image=on_image)
    images = prepared.images
    kept = np.flatnonzero(usable)
    if len(kept) == 0:
        raise InvalidInput(f"no image of {images.location} can be decoded")
    return LabeledRows(
        rows,
        list(images.entries.select(kept).keys()),
        images.splits[kept],
        [images.class_names[place] for place in kept],
    )


def _stored(stored: EmbeddingsArtifact, features: Features) -> LabeledRows:
    if features != "embedding":
        raise ConfigInvalid(
            f"{stored.artifact.path} holds embeddings, not {features} features", remedy="give a checkpoint or a run"
        )
    known = [row for row, class_name in enumerate(stored.class_names) if class_name is not None]
    if not known:
        raise ConfigInvalid(
            f"no image of {stored.artifact.path} has a known class",
            remedy="put the images into one sub-folder per class to evaluate",
        )
    return LabeledRows(
        stored.load()[known],
        [stored.keys[row] for row in known],
        stored.splits[known],
        [str(stored.class_names[row]) for row in known],
    )
