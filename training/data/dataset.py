"""The training set: images of one or more data sets joined with their labels by key.

Nothing is decoded here.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.labels import DIGEST_BYTES, LabelTable
from mlcd.artifacts.manifest import open_artifact
from mlcd.artifacts.selection import Selection
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.images.entries import Entries
from mlcd.images.jpeg import require_simplejpeg
from mlcd.images.matched_keys import match_keys
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.keys import mask_held_out, split_positions
from mlcd.training.data.data_config import MixedSource
from mlcd.training.data.order import block_shares
from mlcd.training.data.settings import DatasetSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """The n samples of one data set, in columns because there may be many millions.

    labels: int32 [n, L], best first, -1 for none. sha256: uint8 [n, 32], of the images that were
    labeled; None where they are not compared. scores: float16 [n, L], of the labels, if the loss
    weighs by them. listing: the digest of the source's listing; None where this process listed it.
    """

    source: Source
    entries: Entries
    labels: NDArray[np.int32]
    sha256: NDArray[np.uint8] | None
    weight: float
    scores: NDArray[np.float16] | None = None
    listing: str | None = None

    @cached_property
    def listing_digest(self) -> str:
        return self.listing or self.source.listing_digest()

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True)
class Dataset:
    """The samples of all data sets, and counts of what cannot be used.

    num_unlabeled: images without labels. num_missing: labels without an image. Held-out images are
    in neither, nor those that a selection leaves out.
    """

    parts: tuple[Part, ...]
    num_unlabeled: int
    num_missing: int
    num_centers: int
    names: list[str | None] | None
    label_tables: tuple[LabelTable, ...]

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        tables: tuple[LabelTable, ...],
        num_unlabeled: int,
        num_missing: int,
    ) -> "Dataset":
        first = tables[0]
        return cls(tuple(parts), num_unlabeled, num_missing, first.num_centers, first.names, tables)

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.parts)

    @property
    def classes(self) -> str | None:
        """Returns the identity of what the labels name; None if they do not tell."""
        return self.label_tables[0].classes if self.label_tables else None

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(part.weight for part in self.parts)


def open_dataset(config: DatasetSettings) -> Dataset:
    """Opens every image of `config.data` that is not held out, is selected and has labels.

    The others are counted, not replaced. Damaged shards are reported and left out. Raises NotFound,
    ArtifactInvalid or InvalidInput if images or labels cannot be used or do not belong together, or
    if a label names an unknown center; ConfigInvalid if a weight of the mixture is too small.
    """
    if config.data.decode == "fast":
        require_simplejpeg()
    sources, tables = config.data.sources, label_tables(config)
    block_shares([source.weight for source in sources])
    joined = [_join(source, table, config) for source, table in zip(sources, tables, strict=True)]
    return Dataset.of(
        [part for part, _, _ in joined],
        tables,
        num_unlabeled=sum(unlabeled for _, unlabeled, _ in joined),
        num_missing=sum(missing for _, _, missing in joined),
    )


def label_tables(config: DatasetSettings, *, verify_files: bool = True) -> tuple[LabelTable, ...]:
    """Opens the labels of every data set. Raises ConfigInvalid if they are of different centers."""
    tables = tuple(
        LabelTable(open_artifact(fetch_copy(source.labels), "labels", verify_files=verify_files))
        for source in config.data.sources
    )
    _refuse_other_centers(tables)
    return tables


def _join(mixed: MixedSource, table: LabelTable, config: DatasetSettings) -> tuple[Part, int, int]:
    """Returns the part, its number of images without labels, and of labels without an image."""
    num_labels, hold_out = config.loss.num_stored, config.data.hold_out
    source = open_source(mixed.images)
    source.check_not_empty()
    entries = source.entries
    for problem in source.problems:
        _log.warning("%s: %s: %s", mixed.images, problem.key, problem.detail)
    kept_out = mask_held_out(split_positions(entries.keys(), entries.class_names()), hold_out)
    if mixed.selection is not None:
        kept_out |= _mask_unselected(entries, mixed)
    matched = match_keys(table.read_keys(), entries.key_column(), mixed.labels)
    row_of_label = matched.indices
    labeled = np.zeros(len(entries), dtype=np.bool_)
    labeled[row_of_label[row_of_label >= 0]] = True
    rows = np.flatnonzero(labeled & ~kept_out)
    if not len(rows):
        raise InvalidInput(
            f"no image of {mixed.images} has labels in {mixed.labels}"
            + (f" and is kept in {mixed.selection}" if mixed.selection else ""),
            remedy="were the labels made from these images?",
        )
    # the last entry stands for keys that are no row
    index_of_row = np.full(len(entries) + 1, -1, dtype=np.int64)
    index_of_row[rows] = np.arange(len(rows))
    labels, sha256 = _labels_at(index_of_row[row_of_label], table, len(rows), num_labels)
    num_missing = int((row_of_label < 0).sum())
    if num_missing:
        _log.warning(
            "%d images labeled in %s are not in %s, such as %s",
            num_missing,
            mixed.labels,
            mixed.images,
            matched.unmatched.first,
        )
    scores = None
    if config.loss.label_weights is not None:
        scores = _scores_at(index_of_row[row_of_label], table, labels.shape)
    part = Part(source, entries.select(rows), labels, sha256, mixed.weight, scores)
    return part, int((~labeled & ~kept_out).sum()), num_missing


def _mask_unselected(entries: Entries, mixed: MixedSource) -> NDArray[np.bool_]:
    """Returns which images the selection of a data set does not keep, [N]."""
    unselected = np.ones(len(entries), np.bool_)
    assert mixed.selection is not None
    keys = Selection.open(fetch_copy(mixed.selection)).read_keys()
    unselected[entries.indices_of(keys, mixed.selection)] = False
    return unselected


def _labels_at(
    indices: NDArray[np.int64], table: LabelTable, num: int, num_labels: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Returns ids int32 [num, num_labels] and SHA-256 uint8 [num, 32], each labeled row at its
    index.

    An index of -1 means that the row has none.
    """
    labels = np.full((num, num_labels), -1, dtype=np.int32)
    sha256 = np.empty((num, DIGEST_BYTES), dtype=np.uint8)
    start = 0
    for ids, digests in table.iter_ids():
        _refuse_unknown(ids, start, table)
        into = indices[start : start + len(ids)]
        start += len(ids)
        used = into >= 0
        width = min(num_labels, ids.shape[1])
        labels[into[used], :width] = ids[used, :width]
        sha256[into[used]] = digests[used]
    return labels, sha256


def _scores_at(
    indices: NDArray[np.int64], table: LabelTable, shape: tuple[int, ...]
) -> NDArray[np.float16]:
    """Returns the scores of the labels that `_labels_at` returns, float16 [num, num_labels]."""
    scores = np.zeros(shape, dtype=np.float16)
    start = 0
    for part in table.iter_scores():
        into = indices[start : start + len(part)]
        start += len(part)
        used = into >= 0
        width = min(shape[1], part.shape[1])
        scores[into[used], :width] = part[used, :width]
    return scores


def _refuse_unknown(ids: NDArray[np.int32], start: int, table: LabelTable) -> None:
    """Raises InvalidInput for a label without a center; ids: the labeled rows from `start` on."""
    unknown = (ids < -1) | (ids >= table.num_centers)
    if unknown.any():
        row, column = np.argwhere(unknown)[0]
        key = table.read_keys()[start + int(row)].as_py()
        raise InvalidInput(
            f"{key} has label {ids[row, column]} in {table.artifact.path}, which is of "
            f"{table.num_centers} centers",
            remedy="label the images again",
        )


def _refuse_other_centers(tables: Sequence[LabelTable]) -> None:
    for first, second in pairwise(tables):
        if (first.num_centers, first.classes) != (second.num_centers, second.classes):
            raise ConfigInvalid(
                f"{first.artifact.path} and {second.artifact.path} must have labels of the same"
                " centers",
                remedy="label all data sets of data.mix with the same centers",
            )
