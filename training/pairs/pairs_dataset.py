"""The pairs of a run: images joined with their captions. Each step draws one caption per image."""

import hashlib
import logging
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.images.captions import Captions, read_captions
from mlcd.images.entries import Entries
from mlcd.images.matched_keys import match_keys
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.keys import mask_held_out, split_positions
from mlcd.randomness import Stream, uniform
from mlcd.training.data.dataset import Dataset, Part
from mlcd.training.data.device_crops import require_decoder
from mlcd.training.pairs.pairs_config import PairsConfig

_log = logging.getLogger(__name__)
_BLOCK: Final = 1 << 16  # captions converted to Python objects at a time


@dataclass(frozen=True)
class PairSet:
    """The n images that have captions and are not held out.

    caption_rows: int64 [n], row of each image in `captions`. num_without: number of images without
    a caption.
    """

    source: Source
    entries: Entries
    captions: Captions
    caption_rows: NDArray[np.int64]
    num_without: int

    def __len__(self) -> int:
        return len(self.entries)

    def select(self, rows: NDArray[np.int64]) -> Self:
        """Returns the pairs of these rows."""
        return replace(
            self, entries=self.entries.select(rows), caption_rows=self.caption_rows[rows]
        )

    def draw(self, rows: NDArray[np.int64], positions: NDArray[np.int64], seed: int) -> list[str]:
        """Draws a caption for the image of each row.

        positions: int64 [b], in the endless stream of samples; the draw depends only on them and
        the seed.
        """
        draws = uniform(seed, Stream.CAPTIONS, positions)
        captions = (self.captions.of(int(row)) for row in self.caption_rows[rows])
        return [
            texts[int(draw * len(texts))]
            for texts, draw in zip(captions, draws.tolist(), strict=True)
        ]

    def digest(self) -> str:
        """Returns the SHA-256 of all captions of the source, in the order of its images."""
        texts = self.captions.texts
        sha256 = hashlib.sha256(texts.value_lengths().to_numpy(zero_copy_only=False).tobytes())
        flat = texts.flatten()
        for start in range(0, len(flat), _BLOCK):
            sha256.update("\0".join(flat[start : start + _BLOCK].to_pylist()).encode())
        return sha256.hexdigest()

    def as_dataset(self) -> Dataset:
        """Returns the images as a data set for the loader; each image's label is its row."""
        labels = np.arange(len(self), dtype=np.int32)[:, None]
        part = Part(self.source, self.entries, labels, sha256=None, weight=1.0)
        return Dataset((part,), self.num_without, 0, len(self), None, ())


def open_pairs(config: PairsConfig) -> PairSet:
    """Lists the images with their captions.

    Raises NotFound or InvalidInput if there are none, ConfigInvalid if all are held out.
    """
    require_decoder(config.data.decode)
    source = open_source(config.data.pairs)
    source.check_not_empty()
    for problem in source.problems:
        _log.warning("%s: %s: %s", config.data.pairs, problem.key, problem.detail)
    entries = source.entries
    captions = read_captions(source, entries)
    captions.unmatched.check(
        f"the captions of {config.data.pairs}", config.data.pairs, may_be_unmatched=True
    )
    if captions.unmatched.num:
        _log.warning("captions of %s: %s", config.data.pairs, captions.unmatched)
    is_held_out = mask_held_out(
        split_positions(entries.keys(), entries.class_names()), config.data.hold_out
    )
    has_caption = captions.texts.value_lengths().to_numpy(zero_copy_only=False) > 0
    caption_rows = np.flatnonzero(has_caption & ~is_held_out)
    if not len(caption_rows) and has_caption.any():
        raise ConfigInvalid(
            "data.hold_out leaves no image with a caption to train on", remedy="lower it"
        )
    if not len(caption_rows):
        raise InvalidInput(
            f"no image of {config.data.pairs} has a caption",
            remedy="add a captions.jsonl to the images, with path and caption in each line",
        )
    num_without = int((~has_caption & ~is_held_out).sum())
    return PairSet(source, entries.select(caption_rows), captions, caption_rows, num_without)


def match_embeddings(
    pairs: PairSet, embeddings: EmbeddingsArtifact
) -> tuple[PairSet, NDArray[np.int64]]:
    """Returns the pairs whose images have embeddings, and the images' rows there, int64 [n].

    Raises InvalidInput if no image has an embedding.
    """
    matched = match_keys(embeddings.keys, pairs.entries.key_column(), str(embeddings.artifact.path))
    index_of_row = matched.indices
    row_of_index = np.full(len(pairs) + 1, -1, dtype=np.int64)
    row_of_index[index_of_row] = np.arange(len(index_of_row))  # -1, for other keys, sets the last
    rows_with_embedding = np.flatnonzero(row_of_index[:-1] >= 0)
    if not len(rows_with_embedding):
        raise InvalidInput(
            f"no image of {pairs.source.location} is in {embeddings.artifact.path}",
            remedy="embed the images of data.pairs",
        )
    if missing := len(pairs) - len(rows_with_embedding):
        _log.warning("%d images lack a row in %s", missing, embeddings.artifact.path)
    return pairs.select(rows_with_embedding), row_of_index[rows_with_embedding]
