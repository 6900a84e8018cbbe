"""The images that a run on pairs was trained on, by their SHA-256."""

import hashlib
from collections.abc import Sequence
from typing import Final

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.artifacts.manifest import Artifact
from mlcd.errors import NotFound
from training.pairs.pairs_config import PairsConfig
from training.pairs.pairs_dataset import embedded, open_pairs

_MOST_READ: Final = 1 << 20  # images whose bytes are read to know their digests


def paired_images(
    config: PairsConfig, listing: str | None, embeddings: Artifact | None
) -> Sequence[bytes]:
    """Returns the SHA-256 of each image with a caption that is not held out.

    config: of the run, with its images where they are now. listing: the digest of the listing when
    the run began. embeddings: those that the run read in place of images, which state the digests;
    otherwise the images themselves are read. Raises NotFound if images were added since, or are too
    many to read.
    """
    pairs = open_pairs(config)
    if pairs.source.listing_digest() != listing:
        raise NotFound(f"{config.data.pairs} has other images than when the run began")
    if embeddings is not None:
        stated = EmbeddingsArtifact(embeddings)
        _, rows = embedded(pairs, stated)
        return [stated.image_sha256[row] for row in rows.tolist()]
    if len(pairs) > _MOST_READ:
        raise NotFound(f"{config.data.pairs} has {len(pairs)} images, which are not read for it")
    return [hashlib.sha256(pairs.source.read(entry)).digest() for entry in pairs.entries]
