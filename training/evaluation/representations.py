"""What evaluators look at: unit embeddings with keys and classes, from an artifact or from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mlcd.artifact import MANIFEST, Artifact, open_artifact
from mlcd.cores import available_cores
from mlcd.embeddings import EmbeddingsArtifact
from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.prefetch import prepare_all
from mlcd.images.sources import open_source
from mlcd.models.checkpoints import find_checkpoint
from mlcd.models.servable import Servable
from mlcd.types import Embeddings, SampleKey
from training.run import read_run_config

_BATCH = 128


@dataclass(frozen=True)
class Representation:
    """embeddings: [N, D] unit rows; keys and class_names: N. Only samples of known class."""

    name: str
    artifact: Artifact
    embeddings: Embeddings
    keys: list[SampleKey]
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
        return _of_known_class(artifact, stored.load(), stored.keys, stored.class_names)
    open_artifact(artifact.path, verify_files=True)
    location = images or read_run_config(artifact.path.resolve().parents[1]).data.images
    rows, keys, class_names = _encode(Servable.read(artifact.path / "weights"), location, on_image)
    return _of_known_class(artifact, rows, keys, class_names)


def _encode(
    model: Servable, location: str, on_image: Callable[[], None]
) -> tuple[Embeddings, list[SampleKey], list[str | None]]:
    source = open_source(location)
    rows: list[np.ndarray] = []
    keys: list[SampleKey] = []
    class_names: list[str | None] = []
    waiting: list[np.ndarray] = []

    def flush() -> None:
        if waiting:
            with torch.inference_mode():
                rows.append(model(torch.from_numpy(np.stack(waiting))).numpy())
            waiting.clear()

    for prepared in prepare_all(source, source.entries, model.preprocess, num_threads=available_cores()):
        on_image()
        if prepared.pixels is None:
            continue
        waiting.append(prepared.pixels)
        keys.append(prepared.entry.key)
        class_names.append(prepared.entry.class_name)
        if len(waiting) == _BATCH:
            flush()
    flush()
    if not keys:
        raise InvalidInput(f"no image of {location} can be decoded")
    return np.concatenate(rows), keys, class_names


def _of_known_class(
    artifact: Artifact, rows: Embeddings, keys: list[SampleKey], class_names: list[str | None]
) -> Representation:
    known = [row for row, class_name in enumerate(class_names) if class_name is not None]
    if not known:
        raise ConfigInvalid(
            f"no image of {artifact.path} has a known class",
            remedy="put the images into one sub-folder per class to evaluate",
        )
    name = artifact.path.name
    return Representation(
        name, artifact, rows[known], [keys[row] for row in known], [str(class_names[row]) for row in known]
    )
