"""Finds the embeddings that an artifact was made from, through its manifest."""

import os
from contextlib import suppress
from pathlib import Path

from mlcd.artifacts.addition import state_with_digest
from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact, Parent, open_artifact
from mlcd.errors import MlcdError, NotFound
from mlcd.locations import is_url


def open_used_embeddings(
    artifact: Artifact, path: Path | None, *, option: str = "--embeddings"
) -> EmbeddingsArtifact:
    """Returns the embeddings at `path`; by default those that the artifact was made from, in their
    state at that time.

    option: command-line option for `path`, named in the error. Raises NotFound if they are missing.
    """
    if path is not None:
        return EmbeddingsArtifact.open(path)
    for parent in artifact.parents:
        if parent.role == "embeddings":
            with suppress(MlcdError):
                embeddings = open_artifact(fetch_copy(_resolve_location(artifact, parent)))
                if (state := state_with_digest(embeddings, parent.digest)) is not None:
                    return EmbeddingsArtifact(state)
    raise NotFound(
        f"the embeddings that {artifact.path} was made from have moved or changed",
        remedy=f"give {option}",
    )


def _resolve_location(artifact: Artifact, parent: Parent) -> str:
    if is_url(parent.path):
        return parent.path
    return os.path.normpath(artifact.path.resolve() / parent.path)
