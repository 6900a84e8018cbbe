"""The embeddings that an artifact was made from, found by its manifest."""

import os
from contextlib import suppress
from pathlib import Path

from mlcd.artifacts.addition import state_with_digest
from mlcd.artifacts.copies import brought
from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact, Parent, open_artifact
from mlcd.errors import MlcdError, NotFound
from mlcd.locations import is_url


def open_used_embeddings(
    made: Artifact, given: Path | None, *, option: str = "--embeddings"
) -> EmbeddingsArtifact:
    """Returns the embeddings at `given`; by default those that the artifact was made from, as they
    were then.

    option: the one of the command that gives others. Raises NotFound where they are gone.
    """
    if given is not None:
        return EmbeddingsArtifact.open(given)
    for parent in made.parents:
        if parent.role == "embeddings":
            with suppress(MlcdError):
                found = open_artifact(brought(_location(made, parent)))
                if (state := state_with_digest(found, parent.digest)) is not None:
                    return EmbeddingsArtifact(state)
    raise NotFound(
        f"the embeddings that {made.path} was made from are not where they were",
        remedy=f"give {option}",
    )


def _location(made: Artifact, parent: Parent) -> str:
    if is_url(parent.path):
        return parent.path
    return os.path.normpath(made.path.resolve() / parent.path)
