"""The image embeddings of a frozen tower, computed once and stored as an embeddings artifact.

An existing artifact of `mlcd embed`, of the same images by the same model, is reused.
"""

from pathlib import Path

import torch

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import MANIFEST, open_artifact
from mlcd.encoders import open_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.encoders.torch import TorchEncoder
from mlcd.errors import ConfigInvalid
from mlcd.images.source import Source
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import PREPROCESS, Servable
from mlcd.pipelines.embed import embed
from mlcd.progress import Stages
from mlcd.training.pairs.pairs_config import PairsConfig
from mlcd.training.processes import Processes
from mlcd.types import Fingerprint


def image_embeddings(
    config: PairsConfig,
    model: Servable,
    source: Source,
    processes: Processes,
    reporter: Stages,
) -> EmbeddingsArtifact:
    """Opens the embeddings of the images, and first creates them if they do not exist.

    model: the tower of model.start, at the run's image size. Raises ConfigInvalid if existing
    embeddings are by another model, or if they do not exist and several processes run.
    """
    path = Path(config.data.embeddings or f"{config.out}-embeddings")
    model_identity = model.fingerprint()
    artifact_identity = _read_identity(config, model)
    if not (path / MANIFEST).is_file():
        if processes.world.size > 1:
            raise ConfigInvalid(
                f"{path} must exist before several processes train",
                remedy=f"run mlcd embed {config.data.pairs} {path} --model {config.model.start}",
            )
        encoder = (
            _open_torch_encoder(model, model_identity, processes)
            if artifact_identity is None
            else open_encoder(_start_of(config))
        )
        embed(source, encoder, path, reporter)
    embeddings = EmbeddingsArtifact.open(path)
    if embeddings.fingerprint not in (model_identity, artifact_identity):
        raise ConfigInvalid(
            f"the embeddings in {path} must be by {_start_of(config)}, but are by another model",
            remedy="leave out data.embeddings, or embed the images with that model",
        )
    return embeddings


def _start_of(config: PairsConfig) -> str:
    assert config.model.start is not None
    return config.model.start


def _open_torch_encoder(model: Servable, fingerprint: Fingerprint, processes: Processes) -> Encoder:
    return TorchEncoder(
        model,
        name="start",
        fingerprint=fingerprint,
        preprocess=model.preprocess,
        num_threads=torch.get_num_threads(),
        device=processes.device.type,
    )


def _read_identity(config: PairsConfig, model: Servable) -> Fingerprint | None:
    """Returns the identity of the model artifact that the run starts from.

    None if model.start is not a model artifact, or the run has another image size.
    """
    folder = Path(_start_of(config))
    if not (folder / MANIFEST).is_file():
        return None
    artifact = open_artifact(folder, verify_files=False)
    if artifact.kind != "model" or PreprocessSpec.read(folder / PREPROCESS) != model.preprocess:
        return None
    return artifact.fingerprint
