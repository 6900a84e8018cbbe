"""The input of evaluators, from an embeddings artifact or by encoding images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import MANIFEST, Artifact, open_artifact
from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.keys import split_positions
from mlcd.models.runs import find_checkpoint, refuse_unfinished, trained_images
from mlcd.models.servable import Servable
from mlcd.world import World
from training.evaluation.image_features import (
    Features,
    ImageSet,
    PreparedImages,
    digest_rows,
    encode,
)
from training.evaluation.labeled_rows import LabeledRows
from training.evaluation.listed_keys import ListedKeys
from training.evaluation.sides import Sides, joined
from training.evaluation.splits import folder_split, key_split


@dataclass(frozen=True)
class Representation:
    """The samples as one artifact represents them.

    digest: the artifact's. train, test: the names of the two sides.
    """

    digest: str
    samples: LabeledRows
    train: str
    test: str


def locate(path: Path) -> Artifact:
    """Opens the embeddings artifact, checkpoint or newest checkpoint of the run at `path`.

    Its files are not yet verified.
    """
    refuse_unfinished(path)
    if not path.is_dir():
        raise NotFound(
            f"{path} does not exist", remedy="give checkpoints, runs or embeddings artifacts"
        )
    if (path / MANIFEST).is_file():
        artifact = open_artifact(path, verify_files=False)
        if artifact.kind == "embeddings":
            return artifact
    return open_artifact(find_checkpoint(path), "checkpoint", verify_files=False)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Returns the last part of each path, or as many more as make all paths distinct."""
    resolved = [path.resolve() for path in paths]
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(set(resolved)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in resolved]


def open_representation(
    artifact: Artifact,
    *,
    images: str | None = None,
    sides: Sides | None = None,
    features: Features = "embedding",
    world: World | None = None,
    device: torch.device | None = None,
    on_image: Callable[[], None] = lambda: None,
    listed: ListedKeys | None = None,
    may_be_unmatched: bool = False,
) -> Representation:
    """Reads an embeddings artifact, or encodes `images` (default: the run's own) or both sides.

    Every process encodes its share of the images, on `device` (default: the CPU); all get all rows.
    `artifact` is the test side of two embeddings artifacts. listed: the samples, whose classes do
    not matter; None for those of known class.
    """
    if artifact.kind == "embeddings":
        samples = _of_embeddings(artifact, sides, features, listed)
        name = images_name(artifact, None)
    else:
        open_artifact(artifact.path, verify_files=True)
        model = Servable.read(artifact.path / "weights").to(device or torch.device("cpu"))

        def encode_at(source: Source) -> LabeledRows:
            chosen = ImageSet.of(source) if listed is None else ImageSet.listed(source, listed)
            prepared = PreparedImages(chosen, model.preprocess)
            return encoded(
                model, prepared, features=features, world=world or World(), on_image=on_image
            )

        if sides is not None and sides.kind == "images":
            samples, name = (
                joined(
                    *(encode_at(open_source(location)) for location in (sides.train, sides.test))
                ),
                "",
            )
        else:
            samples, name = encode_at(images_of(artifact, images)), images_name(artifact, images)
    if sides is not None and sides.kind == "keys":
        samples = sides.choose(samples, may_be_unmatched=may_be_unmatched)
    return Representation(artifact.digest, samples, *_side_names(name, samples, sides))


def _of_embeddings(
    artifact: Artifact,
    sides: Sides | None,
    features: Features,
    listed: ListedKeys | None,
) -> LabeledRows:
    test = EmbeddingsArtifact.open(artifact.path)
    if listed is not None:
        return _stored_of(test, listed, features)
    if sides is None or sides.kind != "embeddings":
        return _stored(test, features)
    train = EmbeddingsArtifact.open(Path(sides.train))
    if train.fingerprint != test.fingerprint:
        raise ConfigInvalid(
            f"{sides.train} and {sides.test} are of two models", remedy="embed both with one model"
        )
    return joined(_stored(train, features), _stored(test, features))


def _side_names(name: str, samples: LabeledRows, sides: Sides | None) -> tuple[str, str]:
    """Returns the names of the known samples and of the tested ones."""
    if sides is not None:
        return sides.names
    if samples.given is None or samples.given.folders is None:
        return name, name
    known, tested = samples.given.folders
    return f"{name}/{known}", f"{name}/{tested}"


def images_of(artifact: Artifact, images: str | None) -> Source:
    """Opens the images that a checkpoint is evaluated on: the given ones, or those it was trained
    on.
    """
    location = images or trained_images(artifact)
    if location is None:
        raise NotFound(
            f"the images of {artifact.path} are not where they were",
            remedy="give them with --images",
        )
    return open_source(location)


def images_name(artifact: Artifact, images: str | None) -> str:
    """Returns the name of the evaluated images: the last part of their path."""
    paths = [parent.path for parent in artifact.parents if parent.role == "images"]
    return PurePosixPath(images or (paths[0] if paths else artifact.path.name)).name


def encoded(
    model: Servable,
    prepared: PreparedImages,
    *,
    features: Features,
    world: World,
    on_image: Callable[[], None] = lambda: None,
) -> LabeledRows:
    """Returns the images that can be decoded, as the model represents them."""
    found = encode(model, prepared, features=features, world=world, on_image=on_image)
    images = prepared.images
    kept = np.flatnonzero(found.usable)
    if len(kept) == 0:
        raise InvalidInput(f"no image of {images.location} can be decoded")
    return LabeledRows(
        found.rows,
        list(images.entries.select(kept).keys()),
        images.splits[kept],
        [images.class_names[index] for index in kept],
        None if images.given is None else images.given.of(kept),
        found.sha256,
    )


def _stored_of(stored: EmbeddingsArtifact, listed: ListedKeys, features: Features) -> LabeledRows:
    _check_features(stored, features)
    rows = listed.places(stored.keys, str(stored.artifact.path)).tolist()
    keys = [stored.keys[row] for row in rows]
    return LabeledRows(
        stored.load()[rows],
        keys,
        split_positions(keys, [None] * len(keys)),
        [""] * len(keys),
        key_split(keys),
        digest_rows([stored.image_sha256[row] for row in rows]),
    )


def _check_features(stored: EmbeddingsArtifact, features: Features) -> None:
    if features != "embedding":
        raise ConfigInvalid(
            f"{stored.artifact.path} holds embeddings, not {features} features",
            remedy="give a checkpoint or a run",
        )


def _stored(stored: EmbeddingsArtifact, features: Features) -> LabeledRows:
    _check_features(stored, features)
    known = [row for row, class_name in enumerate(stored.class_names) if class_name is not None]
    if not known:
        raise ConfigInvalid(
            f"no image of {stored.artifact.path} has a known class",
            remedy="put the images into one sub-folder per class to evaluate",
        )
    class_names, given = [str(stored.class_names[row]) for row in known], None
    if (folders := folder_split(class_names)) is not None:
        given, class_names = folders
    return LabeledRows(
        stored.load()[known],
        [stored.keys[row] for row in known],
        stored.splits[known],
        class_names,
        given,
        digest_rows([stored.image_sha256[row] for row in known]),
    )
