"""The samples of an evaluation and their training, validation and test parts.

The parts are a held-out share of each class, folders, two given sides, or a published file. They
depend only on keys and classes.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.copies import fetch_copy
from mlcd.artifacts.directories import Directory
from mlcd.artifacts.manifest import MANIFEST
from mlcd.errors import ConfigInvalid, InvalidInput, NotFound
from mlcd.images.dataset_parts import parts_of_classes, propose_parts
from mlcd.images.matched_keys import Keys, match_keys
from mlcd.keys import mask_held_out, split_positions
from mlcd.locations import check_no_credentials, is_url
from mlcd.text_tables import decode_text, split_lines
from mlcd.types import SampleKey

# The share of the samples that are not held out. CLIP states no share.
VALIDATION_FRACTION: Final = 0.2
_ORDER: Final = ("train", "val", "test")


@dataclass(frozen=True)
class Split:
    """The parts of a set of samples.

    train, validation, test: bool [N] masks, disjoint, together all samples. folders: names of the
    known and of the tested folders, if folders make the split.
    """

    train: NDArray[np.bool_]
    validation: NDArray[np.bool_]
    test: NDArray[np.bool_]
    folders: tuple[str, str] | None = None

    @property
    def known(self) -> NDArray[np.bool_]:
        """The mask of the samples that are not in the test part."""
        return self.train | self.validation

    def of(self, rows: NDArray[np.int64]) -> "Split":
        """Returns the split of the samples at `rows`."""
        return Split(self.train[rows], self.validation[rows], self.test[rows], self.folders)


def split_samples(splits: NDArray[np.float64], hold_out: float) -> Split:
    """Splits the samples by their positions within their class (see mlcd.keys).

    The first `hold_out` of each class is the test part, and the next samples are for validation.
    """
    test = mask_held_out(splits, hold_out)
    validation = mask_held_out(splits, hold_out + VALIDATION_FRACTION * (1 - hold_out)) & ~test
    return Split(~test & ~validation, validation, test)


def with_validation(split: Split, positions: NDArray[np.float64]) -> Split:
    """Returns the split with a validation part: its own, or else a fifth of each class by
    `positions` (see mlcd.keys).
    """
    if split.validation.any():
        return split
    validation = split.train & mask_held_out(positions, VALIDATION_FRACTION)
    return Split(split.train & ~validation, validation, split.test, split.folders)


def choose_split(own_split: Split | None, positions: NDArray[np.float64], hold_out: float) -> Split:
    """Returns `own_split` with a validation part; if None, the split of `split_samples`."""
    if own_split is None:
        return split_samples(positions, hold_out)
    return with_validation(own_split, positions)


def folder_split(class_names: Sequence[str], location: str = "") -> tuple[Split, list[str]] | None:
    """Returns the split of folders, and the classes inside them; None if the folders are classes.

    Folders make a split if they are the first parts of the classes' paths and at least two of them
    are called train, val, valid, validation, dev or test, in any case. The test part is test, or
    without it all folders except train. location: of the images, for messages. Raises InvalidInput
    if train is missing, if there are other folders beside them, or if they contain no classes.
    """
    part_of_folder = parts_of_classes(class_names)
    if not part_of_folder:
        return None
    parts = [name.partition("/") for name in class_names]
    remedy = propose_parts(location, part_of_folder)
    folder_names = ", ".join(
        sorted(part_of_folder, key=lambda folder: (_ORDER.index(part_of_folder[folder]), folder))
    )
    if "train" not in part_of_folder.values():
        raise InvalidInput(
            f"the folders {folder_names} look like splits, but one called train is missing",
            remedy=remedy,
        )
    if not any(slash for _, slash, _ in parts):
        raise InvalidInput(
            f"the folders {folder_names} are parts of a data set, but images in them lack classes",
            remedy="put them into one sub-folder per class within each part",
        )
    stray = next(
        ("".join(part) for part in parts if not part[1] or part[0] not in part_of_folder), None
    )
    if stray is not None:
        raise InvalidInput(
            f"the folders {folder_names} look like splits, but {stray} is beside them",
            remedy=remedy,
        )
    part_names = np.array([part_of_folder[first] for first, _, _ in parts])
    tested = "test" if "test" in part_of_folder.values() else "val"
    test = part_names == tested
    folders = (
        " and ".join(sorted(folder for folder, part in part_of_folder.items() if part != tested)),
        " and ".join(sorted(folder for folder, part in part_of_folder.items() if part == tested)),
    )
    return Split(part_names == "train", (part_names == "val") & ~test, test, folders), [
        name for _, _, name in parts
    ]


def key_split(keys: Sequence[SampleKey]) -> Split | None:
    """Returns the split of the samples' first folders, ignoring classes; None if they make none."""
    split_and_names = folder_split(keys)
    return None if split_and_names is None else split_and_names[0]


def split_digest(
    keys: Sequence[SampleKey], class_names: Sequence[str], test: NDArray[np.bool_]
) -> str:
    """Returns the SHA-256 over key, class and part (known or test) of every sample.

    Two results with the same digest can be compared. The validation part is not included, as it
    follows from key, class and VALIDATION_FRACTION.
    """
    sha256 = hashlib.sha256()
    for key, class_name, is_test in sorted(zip(keys, class_names, test.tolist(), strict=True)):
        sha256.update(f"{key}\0{class_name}\0{'test' if is_test else 'known'}\n".encode())
    return sha256.hexdigest()


def check_several_classes(class_names: Sequence[str]) -> None:
    """Raises InvalidInput if there are fewer than two classes."""
    if len(set(class_names)) == 1:
        raise InvalidInput(
            f"all {len(class_names)} images are of one class, {class_names[0]}",
            remedy="give at least two classes",
        )


def check_tested_classes(class_names: Sequence[str], split: Split) -> None:
    """Raises InvalidInput if a tested class lacks a known sample, as it could only be wrong."""
    known_names, tested = (
        {name for name, inside in zip(class_names, mask.tolist(), strict=True) if inside}
        for mask in (split.known, split.test)
    )
    if missing := sorted(tested - known_names):
        raise InvalidInput(
            f"class {missing[0]} is tested on, but no image to train on has it ({len(missing)} "
            "such classes)",
            remedy="give both sides one folder per class, with the same names",
        )


def check_probe_split(class_names: Sequence[str], split: Split) -> None:
    """Raises InvalidInput if a part is empty, or a class lacks a training sample."""
    check_several_classes(class_names)
    for name in ("train", "validation", "test"):
        if not getattr(split, name).any():
            raise InvalidInput(
                f"of {len(class_names)} images none falls into the {name} part",
                remedy="give more images per class, or hold out another share",
            )
    num_train, num_classes = int(split.train.sum()), len(set(class_names))
    if num_train < num_classes:
        raise InvalidInput(
            f"a linear probe requires an image to train on for each of {num_classes} classes, got "
            f"{num_train}",
            remedy="give more images per class, or hold out less",
        )
    train_names = {
        name for name, train in zip(class_names, split.train.tolist(), strict=True) if train
    }
    if missing := sorted(set(class_names) - train_names):
        raise InvalidInput(
            f"each class needs an image to train on, but {missing[0]} lacks one ({len(missing)}"
            " such classes)",
            remedy="give more images of it, or hold out less",
        )


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListedKeys:
    """The keys of images in a table.

    table: name of the table for messages. may_be_unmatched: leave out keys that match no image,
    instead of raising.
    """

    keys: Sequence[SampleKey]
    table: str
    may_be_unmatched: bool = False

    def places(self, keys: Keys, images: str) -> NDArray[np.int64]:
        """Returns the indices in `keys` of the listed images, in the order of the table, without
        unmatched ones; raises the errors of `indices`.
        """
        indices = self.indices(keys, images)
        return indices[indices >= 0]

    def indices(self, keys: Keys, images: str) -> NDArray[np.int64]:
        """Returns the index in `keys` of each listed image; -1, with a warning, if unmatched.

        images: location of the images for messages. Raises InvalidInput for an unmatched key,
        unless may_be_unmatched, and for two keys of one image.
        """
        matched = match_keys(self.keys, keys, self.table)
        matched.unmatched.check(self.table, images, may_be_unmatched=self.may_be_unmatched)
        if matched.unmatched.num:
            _log.warning("%s: %s", self.table, matched.unmatched)
        places = matched.indices[matched.indices >= 0]
        distinct, first, counts = np.unique(places, return_index=True, return_counts=True)
        if len(distinct) < len(places):
            place = int(places[np.min(first[counts > 1])])
            twice = [
                key
                for key, index in zip(self.keys, matched.indices.tolist(), strict=True)
                if index == place
            ]
            raise InvalidInput(
                f"{self.table} has one image twice: {twice[0]!a} and {twice[1]!a}",
                remedy="give each image once",
            )
        return matched.indices


@dataclass(frozen=True)
class LabeledRows:
    """N samples of known class, the same in every process.

    rows: float32 [N, D], finite. splits: positions within the class, see mlcd.keys. own_split:
    split of the samples' folders or sides, if any. sha256: uint8 [N, 32] of the images.
    """

    rows: NDArray[np.float32]
    keys: Sequence[SampleKey]
    splits: NDArray[np.float64]
    class_names: Sequence[str]
    own_split: Split | None = None
    sha256: NDArray[np.uint8] | None = None

    def split(self, hold_out: float) -> Split:
        """Returns the samples' own split, or else the split of `split_samples`."""
        return choose_split(self.own_split, self.splits, hold_out)

    @cached_property
    def classes(self) -> NDArray[np.int64]:
        """Returns int64 [N]: the index of each sample's class among the sorted names."""
        _, classes = np.unique(np.asarray(self.class_names), return_inverse=True)
        return classes.astype(np.int64)

    def __post_init__(self) -> None:
        finite = np.isfinite(self.rows.sum(axis=1, dtype=np.float64))
        if not finite.all():
            raise InvalidInput(
                f"the features of {self.keys[int(np.flatnonzero(~finite)[0])]} hold NaN or Inf "
                f"({int((~finite).sum())} of {len(finite)} images)",
                remedy="check whether the model has diverged",
            )


_LIST_SUFFIX: Final = ".txt"

SideKind = Literal["images", "embeddings", "keys"]


@dataclass(frozen=True)
class Sides:
    """The train and the test side, of the same kind.

    They are two locations of images, two embeddings artifacts, or two lists of keys (one per line)
    of images in one location.
    """

    train: str
    test: str
    kind: SideKind

    @classmethod
    def of(cls, train: str, test: str) -> "Sides":
        """Builds the sides; embeddings at URLs are downloaded.

        Raises ConfigInvalid if both sides are the same, or of different kinds.
        """
        train, test = _fetch_embeddings(train), _fetch_embeddings(test)
        kinds = [_kind_of(location) for location in (train, test)]
        if kinds[0] != kinds[1]:
            raise ConfigInvalid(
                f"--train and --test must be of the same kind, got {kinds[0]} in {train} and"
                f" {kinds[1]} in {test}",
                remedy="give --train and --test two folders, two embeddings artifacts or two lists "
                "of keys",
            )
        if train == test or (
            Path(train).exists() and Path(test).exists() and Path(train).samefile(test)
        ):
            raise ConfigInvalid(
                f"--train and --test are both {test}", remedy="test on other images"
            )
        return cls(train, test, kinds[0])

    @property
    def names(self) -> tuple[str, str]:
        """Returns the shortest suffixes of both paths that are distinct."""
        train, test = (PurePosixPath(location).parts for location in (self.train, self.test))
        depth = 1
        while train[-depth:] == test[-depth:] and depth < max(len(train), len(test)):
            depth += 1
        return "/".join(train[-depth:]), "/".join(test[-depth:])

    def digests(self) -> dict[str, str]:
        """Returns the SHA-256 of lists of keys; other kinds are recorded as parents instead."""
        if self.kind != "keys":
            return {}
        locations = {"train": self.train, "test": self.test}
        return {
            f"{side}_keys": hashlib.sha256(Path(location).read_bytes()).hexdigest()
            for side, location in locations.items()
        }

    def choose(self, samples: LabeledRows, *, may_be_unmatched: bool = False) -> LabeledRows:
        """Returns the samples on the two lists of keys, with their split.

        Raises InvalidInput for an unmatched key, unless may_be_unmatched, or a key on both lists.
        """
        train, test = (
            _find_rows(location, samples.keys, may_be_unmatched=may_be_unmatched)
            for location in (self.train, self.test)
        )
        if len(both := np.intersect1d(train, test)):
            raise InvalidInput(
                f"{samples.keys[both[0]]} is on both lists ({len(both)} such keys)",
                remedy="test on other images",
            )
        return join_sides(select_rows(samples, train), select_rows(samples, test))


def join_sides(train: LabeledRows, test: LabeledRows) -> LabeledRows:
    """Joins the samples of both sides, with their split; raises as `join_parts`."""
    return join_parts(train, None, test)


def join_parts(
    train: LabeledRows, validation: LabeledRows | None, test: LabeledRows
) -> LabeledRows:
    """Joins the samples of all parts, with their split.

    Raises InvalidInput for parts with splits of their own, for rows of different dimensions, and
    for a tested class without known samples.
    """
    if train.own_split is not None or test.own_split is not None:
        raise InvalidInput(
            "the folders of one side are called train, val, valid or test themselves",
            remedy="give --train and --test such folders, or leave both out",
        )
    if train.rows.shape[1] != test.rows.shape[1]:
        raise InvalidInput(
            f"both sides must have rows of the same dimension, got {train.rows.shape[1]} and "
            f"{test.rows.shape[1]}"
        )
    parts = [train, test] if validation is None else [train, validation, test]
    part_index = np.repeat(np.arange(len(parts)), [len(part.keys) for part in parts])
    tested = part_index == len(parts) - 1
    split = Split(part_index == 0, ~tested & (part_index != 0), tested)
    class_names = [name for part in parts for name in part.class_names]
    check_tested_classes(class_names, split)
    digests = [part.sha256 for part in parts if part.sha256 is not None]
    return LabeledRows(
        np.concatenate([part.rows for part in parts]),
        [key for part in parts for key in part.keys],
        np.concatenate([part.splits for part in parts]),
        class_names,
        split,
        np.concatenate(digests) if len(digests) == len(parts) else None,
    )


def _fetch_embeddings(location: str) -> str:
    """Downloads embeddings at a URL and returns the copy's path; returns other locations unchanged.

    Raises ConfigInvalid for an invalid URL.
    """
    is_of_store = is_url(check_no_credentials(location)) and "::" not in location
    if is_of_store and Directory.at(location).has(MANIFEST):
        return str(fetch_copy(location))
    return location


def _kind_of(location: str) -> SideKind:
    path = Path(location)
    if (path / MANIFEST).is_file():
        return "embeddings"
    return "keys" if path.suffix == _LIST_SUFFIX and path.is_file() else "images"


def _find_rows(
    location: str, keys: Sequence[SampleKey], *, may_be_unmatched: bool
) -> NDArray[np.int64]:
    text = decode_text(Path(location).read_bytes(), location)
    listed = list(dict.fromkeys(filter(None, split_lines(text))))
    if not listed:
        raise InvalidInput(
            f"{location} must list at least one key",
            remedy="give one key per line, as `mlcd embed` lists them: the path inside a folder",
        )
    return ListedKeys(listed, location, may_be_unmatched).places(
        keys, "the images that can be used"
    )


def select_rows(samples: LabeledRows, rows: NDArray[np.int64]) -> LabeledRows:
    """Returns the samples at `rows`, with new positions within their classes."""
    keys, class_names = _select(samples.keys, rows), _select(samples.class_names, rows)
    return LabeledRows(
        samples.rows[rows],
        keys,
        split_positions(keys, class_names),
        class_names,
        None,
        None if samples.sha256 is None else samples.sha256[rows],
    )


def _select(values: Sequence[str], rows: NDArray[np.int64]) -> list[str]:
    return [values[row] for row in rows]


_FORM: Final = 'give {"train": [keys], "test": [keys]}, "val" too, or "folds" in place of "train"'


@dataclass(frozen=True)
class SplitFile:
    """The parts of a data set by keys.

    folds: training parts; several for a data set with folds. validation: None takes a fifth of the
    training part. sha256: of the file.
    """

    folds: tuple[tuple[SampleKey, ...], ...]
    validation: tuple[SampleKey, ...] | None
    test: tuple[SampleKey, ...]
    sha256: str

    def parts(
        self, samples: LabeledRows, *, may_be_unmatched: bool = False
    ) -> Iterator[LabeledRows]:
        """Yields the samples of each fold with the split; samples in no part are left out.

        Raises InvalidInput for an unmatched key, unless may_be_unmatched, and a key in two parts.
        """
        samples_without_split = replace(samples, own_split=None)
        validation_keys = [] if self.validation is None else [*self.validation]
        for fold in self.folds:
            keys = [*fold, *validation_keys, *self.test]
            _check_distinct(keys)
            # Matched together, to notice two spellings of one key in different parts.
            listed = ListedKeys(keys, "the split", may_be_unmatched)
            indices = listed.indices(samples.keys, "the images that can be used")
            ends = [len(fold), len(fold) + len(validation_keys)]
            train, validation, test = (part[part >= 0] for part in np.split(indices, ends))
            if not len(train) or not len(test):
                raise InvalidInput(
                    "each part of the split needs images that can be used, but one is empty",
                    remedy="give the images that the split was made for",
                )
            yield join_parts(
                select_rows(samples_without_split, train),
                None if self.validation is None else select_rows(samples_without_split, validation),
                select_rows(samples_without_split, test),
            )


def read_split(path: Path) -> SplitFile:
    """Reads a split file. Raises NotFound, or InvalidInput for an invalid file."""
    if not path.is_file():
        raise NotFound(f"no split at {path}", remedy=_FORM)
    data = path.read_bytes()
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON", remedy=_FORM) from error
    if not isinstance(content, dict) or ("train" in content) == ("folds" in content):
        given = "both" if isinstance(content, dict) and "train" in content else "neither"
        raise InvalidInput(f"{path} must contain either train or folds, got {given}", remedy=_FORM)
    folds = content["folds"] if "folds" in content else [content["train"]]
    validation = content.get("val")
    if not isinstance(folds, list) or not folds:
        raise InvalidInput(f"{path}: folds must be a list with at least one part", remedy=_FORM)
    return SplitFile(
        tuple(_keys(path, "a training part", fold) for fold in folds),
        None if validation is None else _keys(path, "val", validation),
        _keys(path, "test", content.get("test")),
        hashlib.sha256(data).hexdigest(),
    )


def _keys(path: Path, part: str, value: Any) -> tuple[SampleKey, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(key, str) for key in value):
        raise InvalidInput(f"{path}: {part} must be a list of keys", remedy=_FORM)
    return tuple(value)


def _check_distinct(keys: Sequence[SampleKey]) -> None:
    (key, num), *_ = Counter(keys).most_common(1)
    if num > 1:
        raise InvalidInput(
            f"each key must occur once in the split, got {key} {num} times",
            remedy="keep it in one part",
        )
