"""The embeddings of a frozen image tower, made once and kept as an artifact.

It is the artifact that `mlcd embed` makes: one that lies there already, made of the same images by
the same model, is taken.
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
    """Opens the embeddings of the images by `model`, the tower of model.start at the size of the
    run; makes them first where they are not there yet.

    Raises ConfigInvalid if those that are there are by another model, or if several processes run
    and there are none.
    """
    path = Path(config.data.embeddings or f"{config.out}-embeddings")
    own, artifact_identity = model.fingerprint(), _read_identity(config, model)
    if not (path / MANIFEST).is_file():
        if processes.world.size > 1:
            raise ConfigInvalid(
                f"{path} does not exist, and several processes do not make it",
                remedy=f"first: mlcd embed {config.data.pairs} {path} --model {config.model.start}",
            )
        encoder = (
            _in_torch(model, own, processes)
            if artifact_identity is None
            else open_encoder(_start(config))
        )
        embed(source, encoder, path, reporter)
    embeddings = EmbeddingsArtifact.open(path)
    if embeddings.fingerprint not in (own, artifact_identity):
        raise ConfigInvalid(
            f"{path} was not made by {_start(config)}",
            remedy="leave out data.embeddings, or embed the images by it",
        )
    return embeddings


def _start(config: PairsConfig) -> str:
    assert config.model.start is not None
    return config.model.start


def _in_torch(model: Servable, fingerprint: Fingerprint, processes: Processes) -> Encoder:
    return TorchEncoder(
        model,
        name="start",
        fingerprint=fingerprint,
        preprocess=model.preprocess,
        num_threads=torch.get_num_threads(),
        device=processes.device.type,
    )


def _read_identity(config: PairsConfig, model: Servable) -> Fingerprint | None:
    """Returns the identity of the model artifact that the run starts from; None where it starts
    from something else, or at another size.
    """
    folder = Path(_start(config))
    if not (folder / MANIFEST).is_file():
        return None
    artifact = open_artifact(folder, verify_files=False)
    if artifact.kind != "model" or PreprocessSpec.read(folder / PREPROCESS) != model.preprocess:
        return None
    return artifact.fingerprint
