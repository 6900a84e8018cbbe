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
from mlcd.images.matched_keys import match_keys
from mlcd.images.source import Source
from mlcd.images.sources import open_source
from mlcd.keys import mask_held_out, split_positions
from mlcd.training.data.data_config import MixedSource
from mlcd.training.data.device_crops import require_decoder
from mlcd.training.data.order import block_shares
from mlcd.training.data.settings import DatasetSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """The n samples of one data set, in columns because there may be many millions.

    labels: int32 [n, L], best first, -1 for none. sha256: uint8 [n, 32], digests of the labeled
    images; None skips the comparison. weight: of this data set in a mixture. scores: float16
    [n, L], of the labels; None unless the loss weighs labels by score. listing: digest of the
    source's listing; None computes it from the source.
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
    """The samples of all data sets.

    num_unlabeled: number of images without labels, not counting held-out and unselected images.
    num_missing: number of labeled images that the data sets do not contain. names: of the classes.
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
        """Returns the digest of the labels' classes; None if the labels do not record it."""
        return self.label_tables[0].classes if self.label_tables else None

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(part.weight for part in self.parts)


def open_dataset(config: DatasetSettings) -> Dataset:
    """Opens the images of `config.data` that are selected, not held out, and have labels.

    Damaged shards are logged and left out. Raises NotFound, ArtifactInvalid or InvalidInput if
    images or labels cannot be read, no image has labels, or a label lacks its center; ConfigInvalid
    if a weight of the mixture is too small.
    """
    require_decoder(config.data.decode)
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
    """Opens the labels of all data sets. Raises ConfigInvalid if their centers differ."""
    tables = tuple(
        LabelTable(open_artifact(fetch_copy(source.labels), "labels", verify_files=verify_files))
        for source in config.data.sources
    )
    _check_same_centers(tables)
    return tables


def _join(mixed: MixedSource, table: LabelTable, config: DatasetSettings) -> tuple[Part, int, int]:
    """Returns the part, its number of images without labels, and of labels without image."""
    num_labels, hold_out = config.loss.num_stored, config.data.hold_out
    source = open_source(mixed.images)
    source.check_not_empty()
    entries = source.entries
    for problem in source.problems:
        _log.warning("%s: %s: %s", mixed.images, problem.key, problem.detail)
    is_excluded = mask_held_out(split_positions(entries.keys(), entries.class_names()), hold_out)
    if mixed.selection is not None:
        is_excluded |= _mask_unselected(entries, mixed)
    matched = match_keys(table.read_keys(), entries.key_column(), mixed.labels)
    entry_of_label = matched.indices
    is_labeled = np.zeros(len(entries), dtype=np.bool_)
    is_labeled[entry_of_label[entry_of_label >= 0]] = True
    rows = np.flatnonzero(is_labeled & ~is_excluded)
    if not len(rows):
        raise InvalidInput(
            f"no image of {mixed.images} has labels in {mixed.labels}"
            + (f" and is selected in {mixed.selection}" if mixed.selection else ""),
            remedy="give the images that the labels were made from",
        )
    # The last entry is for labels without an image, whose index is -1.
    row_of_entry = np.full(len(entries) + 1, -1, dtype=np.int64)
    row_of_entry[rows] = np.arange(len(rows))
    labels, sha256 = _read_labels(row_of_entry[entry_of_label], table, len(rows), num_labels)
    num_missing = int((entry_of_label < 0).sum())
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
        scores = _read_scores(row_of_entry[entry_of_label], table, labels.shape)
    part = Part(source, entries.select(rows), labels, sha256, mixed.weight, scores)
    return part, int((~is_labeled & ~is_excluded).sum()), num_missing


def _mask_unselected(entries: Entries, mixed: MixedSource) -> NDArray[np.bool_]:
    """Returns a mask of the images that the selection of a data set leaves out, bool [N]."""
    unselected = np.ones(len(entries), np.bool_)
    assert mixed.selection is not None
    keys = Selection.open(fetch_copy(mixed.selection)).read_keys()
    unselected[entries.indices_of(keys, mixed.selection)] = False
    return unselected


def _read_labels(
    indices: NDArray[np.int64], table: LabelTable, num: int, num_labels: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Returns ids int32 [num, num_labels] and SHA-256 uint8 [num, 32].

    indices: for each row of the table its row in the result; -1 leaves it out.
    """
    labels = np.full((num, num_labels), -1, dtype=np.int32)
    sha256 = np.empty((num, DIGEST_BYTES), dtype=np.uint8)
    start = 0
    for ids, digests in table.iter_ids():
        _check_known(ids, start, table)
        targets = indices[start : start + len(ids)]
        start += len(ids)
        is_used = targets >= 0
        width = min(num_labels, ids.shape[1])
        labels[targets[is_used], :width] = ids[is_used, :width]
        sha256[targets[is_used]] = digests[is_used]
    return labels, sha256


def _read_scores(
    indices: NDArray[np.int64], table: LabelTable, shape: tuple[int, ...]
) -> NDArray[np.float16]:
    """Returns the scores of the labels that `_read_labels` returns, float16 [num, num_labels]."""
    scores = np.zeros(shape, dtype=np.float16)
    start = 0
    for part in table.iter_scores():
        targets = indices[start : start + len(part)]
        start += len(part)
        is_used = targets >= 0
        width = min(shape[1], part.shape[1])
        scores[targets[is_used], :width] = part[is_used, :width]
    return scores


def _check_known(ids: NDArray[np.int32], start: int, table: LabelTable) -> None:
    """Raises InvalidInput for a label without a center. ids: rows of the table from `start`."""
    unknown = (ids < -1) | (ids >= table.num_centers)
    if unknown.any():
        row, column = np.argwhere(unknown)[0]
        key = table.read_keys()[start + int(row)].as_py()
        raise InvalidInput(
            f"labels in {table.artifact.path} must name one of its {table.num_centers} centers, "
            f"got {ids[row, column]} for {key}",
            remedy="label the images again",
        )


def _check_same_centers(tables: Sequence[LabelTable]) -> None:
    for first, second in pairwise(tables):
        if (first.num_centers, first.classes) != (second.num_centers, second.classes):
            raise ConfigInvalid(
                f"{first.artifact.path} and {second.artifact.path} must have labels of the same"
                " centers",
                remedy="label all data sets of data.mix with the same centers",
            )
