"""What evaluators look at: unit embeddings with keys and classes, from an artifact or from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mlcd.artifact import MANIFEST, Artifact, open_artifact
from mlcd.cores import available_cores
from mlcd.embeddings import EmbeddingsArtifact
from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.prefetch import prepare_all
from mlcd.images.sources import Source, open_source
from mlcd.keys import split_positions
from mlcd.models.runs import find_checkpoint, trained_images
from mlcd.models.servable import Servable
from mlcd.types import Embeddings

_BATCH = 128


@dataclass(frozen=True)
class Representation:
    """embeddings: [N, D] unit rows; splits (see mlcd.keys) and class_names: N. Only samples of known class."""

    name: str
    artifact: Artifact
    embeddings: Embeddings
    splits: NDArray[np.float64]
    class_names: list[str]


def locate(path: Path) -> Artifact:
    """The embeddings artifact, checkpoint, or newest checkpoint of the run at `path`, not yet verified in full."""
    if not path.is_dir():
        raise NotFound(f"{path} does not exist", remedy="give checkpoints, runs or embeddings artifacts")
    if (path / MANIFEST).is_file():
        artifact = open_artifact(path, verify_files=False)
        if artifact.kind == "embeddings":
            return artifact
    return open_artifact(find_checkpoint(path), "checkpoint", verify_files=False)


def open_representation(
    path: Path, *, images: str | None = None, on_image: Callable[[], None] = lambda: None
) -> Representation:
    """An embeddings artifact as it is; a checkpoint or run by encoding `images` (default: the run's own)."""
    artifact = locate(path)
    if artifact.kind == "embeddings":
        stored = EmbeddingsArtifact.open(path)
        return _of_known_class(artifact, stored.load(), stored.splits, stored.class_names)
    open_artifact(artifact.path, verify_files=True)
    source = images_of(artifact, images)
    rows, splits, class_names = _encode(Servable.read(artifact.path / "weights"), source, on_image)
    return _of_known_class(artifact, rows, splits, class_names)


def images_of(artifact: Artifact, images: str | None) -> Source:
    """The images that a checkpoint is evaluated on: those given, or those it was trained on."""
    location = images or trained_images(artifact)
    if location is None:
        raise NotFound(f"the images of {artifact.path} are not where they were", remedy="give them with --images")
    return open_source(location)


def _encode(
    model: Servable, source: Source, on_image: Callable[[], None]
) -> tuple[Embeddings, NDArray[np.float64], list[str | None]]:
    entries = source.entries
    position = split_positions([entry.key for entry in entries], [entry.class_name for entry in entries])
    split_of = {entry.key: split for entry, split in zip(entries, position.tolist(), strict=True)}
    rows: list[np.ndarray] = []
    splits: list[float] = []
    class_names: list[str | None] = []
    waiting: list[np.ndarray] = []

    def flush() -> None:
        if waiting:
            with torch.inference_mode():
                rows.append(model(torch.from_numpy(np.stack(waiting))).numpy())
            waiting.clear()

    for prepared in prepare_all(source, entries, model.preprocess, num_threads=available_cores()):
        on_image()
        if prepared.pixels is None:
            continue
        waiting.append(prepared.pixels)
        splits.append(split_of[prepared.entry.key])
        class_names.append(prepared.entry.class_name)
        if len(waiting) == _BATCH:
            flush()
    flush()
    if not rows:
        raise InvalidInput(f"no image of {source.location} can be decoded")
    return np.concatenate(rows), np.array(splits), class_names


def _of_known_class(
    artifact: Artifact, rows: Embeddings, splits: NDArray[np.float64], class_names: list[str | None]
) -> Representation:
    known = [row for row, class_name in enumerate(class_names) if class_name is not None]
    if not known:
        raise ConfigInvalid(
            f"no image of {artifact.path} has a known class",
            remedy="put the images into one sub-folder per class to evaluate",
        )
    return Representation(
        artifact.path.name, artifact, rows[known], splits[known], [str(class_names[i]) for i in known]
    )
