"""The images that embeddings were made from, found by the manifest."""

import os
from pathlib import Path

import pyarrow as pa

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.errors import InvalidInput, NotFound
from mlcd.images.entries import Entries
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.locations import is_url


def open_embedded_images(
    embeddings: EmbeddingsArtifact,
) -> tuple[Source, Entries]:
    """Returns the source of the images, and the image of each row.

    Raises InvalidInput for embeddings that were not made from images, NotFound if an image is
    missing.
    """
    place = read_images_place(embeddings)
    source = open_source(place)
    indices = source.entries.find(pa.chunked_array([embeddings.keys], pa.large_string()))
    if (indices < 0).any():
        raise NotFound(
            f"{place} lacks the image {embeddings.keys[int((indices < 0).argmax())]}",
            remedy=f"put the image back at {place}",
        )
    return source, source.entries.select(indices.astype("int64"))


def read_images_place(embeddings: EmbeddingsArtifact) -> str:
    """Returns the images' path or URL from the manifest. Raises InvalidInput if it has none."""
    artifact = embeddings.artifact
    place = next((parent.path for parent in artifact.parents if parent.role == "images"), None)
    if place is None:
        raise InvalidInput(
            f"{artifact.path} must be made from images, found no place of images in its manifest",
            remedy="give embeddings that `mlcd embed` made",
        )
    return place if is_url(place) else os.path.normpath(Path(artifact.path).resolve() / place)
