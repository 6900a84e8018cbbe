"""The samples of an evaluation and their training, validation and test parts.

A share of each class is held out, or folders, two sides given by hand or a published file make the
parts. All of it is a function of keys and classes.
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

    train, validation, test: bool [N] each, disjoint, together all. folders: the names of the known
    and of the tested folder, if folders make the split.
    """

    train: NDArray[np.bool_]
    validation: NDArray[np.bool_]
    test: NDArray[np.bool_]
    folders: tuple[str, str] | None = None

    @property
    def known(self) -> NDArray[np.bool_]:
        """The mask of the samples that are not tested on."""
        return self.train | self.validation

    def of(self, rows: NDArray[np.int64]) -> "Split":
        """Returns the split of the samples at `rows`."""
        return Split(self.train[rows], self.validation[rows], self.test[rows], self.folders)


def split_samples(splits: NDArray[np.float64], hold_out: float) -> Split:
    """Splits the samples by their positions within their class (see mlcd.keys).

    The held-out share of each class is tested on; the next samples of the same order validate.
    """
    test = mask_held_out(splits, hold_out)
    validation = mask_held_out(splits, hold_out + VALIDATION_FRACTION * (1 - hold_out)) & ~test
    return Split(~test & ~validation, validation, test)


def with_validation(split: Split, positions: NDArray[np.float64]) -> Split:
    """Returns the split with a validation part.

    If none was given, it is a fifth of each class by `positions` (see mlcd.keys).
    """
    if split.validation.any():
        return split
    validation = split.train & mask_held_out(positions, VALIDATION_FRACTION)
    return Split(split.train & ~validation, validation, split.test, split.folders)


def choose_split(own_split: Split | None, positions: NDArray[np.float64], hold_out: float) -> Split:
    """Returns the given split with a validation part, or else that of `split_samples`."""
    if own_split is None:
        return split_samples(positions, hold_out)
    return with_validation(own_split, positions)


def folder_split(class_names: Sequence[str], location: str = "") -> tuple[Split, list[str]] | None:
    """Returns the split that folders make, and the classes within it; None if folders are classes.

    Folders make a split if they are the first parts of the classes' paths and at least two of them
    are called train, val, valid, validation, dev or test, in capitals or not. test is tested on;
    without it the others but train are. location: that of the images, to name the two sides by.
    Raises InvalidInput if train is missing, if other classes are beside them, or if they hold none.
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
            f"the folders {folder_names} look like splits, but {stray} stands beside them",
            remedy=remedy,
        )
    part_of = np.array([part_of_folder[first] for first, _, _ in parts])
    tested = "test" if "test" in part_of_folder.values() else "val"
    test = part_of == tested
    folders = (
        " and ".join(sorted(folder for folder, part in part_of_folder.items() if part != tested)),
        " and ".join(sorted(folder for folder, part in part_of_folder.items() if part == tested)),
    )
    return Split(part_of == "train", (part_of == "val") & ~test, test, folders), [
        name for _, _, name in parts
    ]


def key_split(keys: Sequence[SampleKey]) -> Split | None:
    """Returns the split that the first folders of samples make, whatever their classes are."""
    split_and_names = folder_split(keys)
    return None if split_and_names is None else split_and_names[0]


def split_digest(
    keys: Sequence[SampleKey], class_names: Sequence[str], test: NDArray[np.bool_]
) -> str:
    """Returns the SHA-256 over key, class and part (known or test) of every sample.

    Two results with the same one can be compared. A validation part follows from these by
    VALIDATION_FRACTION.
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
    """Raises InvalidInput if a tested class is not a known one, so that it could only be wrong."""
    known_names, tested = (
        {name for name, inside in zip(class_names, mask.tolist(), strict=True) if inside}
        for mask in (split.known, split.test)
    )
    if missing := sorted(tested - known_names):
        raise InvalidInput(
            f"class {missing[0]} is tested on, but no image to train on has it ({len(missing)} "
            "such classes)",
            remedy="are the folders of both sides one per class, with the same names?",
        )


def check_probe_split(class_names: Sequence[str], split: Split) -> None:
    """Raises InvalidInput if a linear probe cannot be trained, chosen or tested."""
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
            f"{num_train} images to train on are fewer than the {num_classes} classes",
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

    table: its name for people. may_be_unmatched: keys of no image are left out instead of refused.
    """

    keys: Sequence[SampleKey]
    table: str
    may_be_unmatched: bool = False

    def places(self, keys: Keys, images: str) -> NDArray[np.int64]:
        """Returns the places of the listed images among `keys`, in the order of the table; raises
        as `indices` does.
        """
        indices = self.indices(keys, images)
        return indices[indices >= 0]

    def indices(self, keys: Keys, images: str) -> NDArray[np.int64]:
        """Returns the place of each listed image among `keys`, -1 for one that is not there, which
        are logged.

        images: their place for people. Raises InvalidInput for the key of no image unless these may
        be, and for two keys of one image.
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
    """Rows of known class, the same in every process.

    rows: float32 [N, D], finite. keys, splits (see mlcd.keys) and class_names: N. own_split: the
    split that the samples come with, if any. sha256: uint8 [N, 32] of the images.
    """

    rows: NDArray[np.float32]
    keys: Sequence[SampleKey]
    splits: NDArray[np.float64]
    class_names: Sequence[str]
    own_split: Split | None = None
    sha256: NDArray[np.uint8] | None = None

    def split(self, hold_out: float) -> Split:
        """Returns the given split, or else that of `split_samples`."""
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
                remedy="has the model diverged?",
            )


_LIST_SUFFIX: Final = ".txt"

SideKind = Literal["images", "embeddings", "keys"]


@dataclass(frozen=True)
class Sides:
    """Two sides of one kind.

    These are two places of images, two embeddings artifacts, or two lists of keys (one a line) of
    images in one place.
    """

    train: str
    test: str
    kind: SideKind

    @classmethod
    def of(cls, train: str, test: str) -> "Sides":
        """Builds the sides; embeddings at URLs are brought here.

        Raises ConfigInvalid if both are the same or of different kinds.
        """
        train, test = _here(train), _here(test)
        kinds = [_kind(location) for location in (train, test)]
        if kinds[0] != kinds[1]:
            raise ConfigInvalid(
                f"{train} holds {kinds[0]} and {test} {kinds[1]}",
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
        """Returns the last part of each path, or as many more as make them distinct."""
        train, test = (PurePosixPath(location).parts for location in (self.train, self.test))
        depth = 1
        while train[-depth:] == test[-depth:] and depth < max(len(train), len(test)):
            depth += 1
        return "/".join(train[-depth:]), "/".join(test[-depth:])

    def digests(self) -> dict[str, str]:
        """Returns the SHA-256 of lists, which decide a result; other kinds are its parents."""
        if self.kind != "keys":
            return {}
        locations = {"train": self.train, "test": self.test}
        return {
            f"{side}_keys": hashlib.sha256(Path(location).read_bytes()).hexdigest()
            for side, location in locations.items()
        }

    def choose(self, samples: LabeledRows, *, may_be_unmatched: bool = False) -> LabeledRows:
        """Returns the samples on the two lists of keys.

        Raises InvalidInput for a key of no sample, unless these may be, or one on both lists.
        """
        train, test = (
            _rows_of(location, samples.keys, may_be_unmatched=may_be_unmatched)
            for location in (self.train, self.test)
        )
        if len(both := np.intersect1d(train, test)):
            raise InvalidInput(
                f"{samples.keys[both[0]]} is on both lists ({len(both)} such keys)",
                remedy="test on other images",
            )
        return join_sides(select_rows(samples, train), select_rows(samples, test))


def join_sides(train: LabeledRows, test: LabeledRows) -> LabeledRows:
    """Returns the samples of both sides and their split. Raises InvalidInput if they do not fit."""
    return of_parts(train, None, test)


def of_parts(train: LabeledRows, validation: LabeledRows | None, test: LabeledRows) -> LabeledRows:
    """Returns the samples of all parts and their split; validation: None if it is not given.

    Raises InvalidInput if they do not fit.
    """
    if train.own_split is not None or test.own_split is not None:
        raise InvalidInput(
            "the folders of one side are called train, val, valid or test themselves",
            remedy="give --train and --test such folders, or leave both out",
        )
    if train.rows.shape[1] != test.rows.shape[1]:
        raise InvalidInput(
            f"rows of {train.rows.shape[1]} and of {test.rows.shape[1]} cannot be compared"
        )
    parts = [train, test] if validation is None else [train, validation, test]
    number = np.repeat(np.arange(len(parts)), [len(part.keys) for part in parts])
    tested = number == len(parts) - 1
    split = Split(number == 0, ~tested & (number != 0), tested)
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


def _here(location: str) -> str:
    """Returns the path of the copy of embeddings at a URL; any other place as it is.

    Raises ConfigInvalid for a URL that none may be.
    """
    is_of_store = is_url(check_no_credentials(location)) and "::" not in location
    if is_of_store and Directory.at(location).has(MANIFEST):
        return str(fetch_copy(location))
    return location


def _kind(location: str) -> SideKind:
    path = Path(location)
    if (path / MANIFEST).is_file():
        return "embeddings"
    return "keys" if path.suffix == _LIST_SUFFIX and path.is_file() else "images"


def _rows_of(
    location: str, keys: Sequence[SampleKey], *, may_be_unmatched: bool
) -> NDArray[np.int64]:
    text = decode_text(Path(location).read_bytes(), location)
    listed = list(dict.fromkeys(filter(None, split_lines(text))))
    if not listed:
        raise InvalidInput(
            f"{location} lists no key",
            remedy="give one key a line, as `mlcd embed` lists them: the path inside a folder",
        )
    return ListedKeys(listed, location, may_be_unmatched).places(keys, "those that can be used")


def select_rows(samples: LabeledRows, rows: NDArray[np.int64]) -> LabeledRows:
    """Returns the samples at `rows`, with new positions within their classes."""
    keys, class_names = _at(samples.keys, rows), _at(samples.class_names, rows)
    return LabeledRows(
        samples.rows[rows],
        keys,
        split_positions(keys, class_names),
        class_names,
        None,
        None if samples.sha256 is None else samples.sha256[rows],
    )


def _at(values: Sequence[str], rows: NDArray[np.int64]) -> list[str]:
    return [values[row] for row in rows]


_FORM: Final = 'give {"train": [keys], "test": [keys]}, "val" too, or "folds" in place of "train"'


@dataclass(frozen=True)
class SplitFile:
    """The parts of a data set by keys.

    folds: the training parts, one unless the data set is to be trained on each of several.
    validation: None if it is to be taken from the training part. sha256: of the file.
    """

    folds: tuple[tuple[SampleKey, ...], ...]
    validation: tuple[SampleKey, ...] | None
    test: tuple[SampleKey, ...]
    sha256: str

    def parts(
        self, samples: LabeledRows, *, may_be_unmatched: bool = False
    ) -> Iterator[LabeledRows]:
        """Yields the samples of each fold with the split; samples in no part are left out.

        Raises InvalidInput for a key of no sample, unless these may be, and for one in two parts.
        """
        plain = replace(samples, own_split=None)
        validation_keys = [] if self.validation is None else [*self.validation]
        for fold in self.folds:
            keys = [*fold, *validation_keys, *self.test]
            _check_distinct(keys)
            # all together, so that two spellings of one key are not in two parts
            listed = ListedKeys(keys, "the split", may_be_unmatched)
            indices = listed.indices(samples.keys, "those that can be used")
            ends = [len(fold), len(fold) + len(validation_keys)]
            train, validation, test = (part[part >= 0] for part in np.split(indices, ends))
            if not len(train) or not len(test):
                raise InvalidInput(
                    "each part of the split needs images that can be used, but one is empty",
                    remedy="are these the images that the split was made for?",
                )
            yield of_parts(
                select_rows(plain, train),
                None if self.validation is None else select_rows(plain, validation),
                select_rows(plain, test),
            )


def read_split(path: Path) -> SplitFile:
    """Reads a split. Raises NotFound, or InvalidInput for a file of another form."""
    if not path.is_file():
        raise NotFound(f"no split at {path}", remedy=_FORM)
    data = path.read_bytes()
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON", remedy=_FORM) from error
    if not isinstance(content, dict) or ("train" in content) == ("folds" in content):
        raise InvalidInput(f"{path} must hold a split", remedy=_FORM)
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
        raise InvalidInput(f"{key} is in two parts of the split", remedy="test on other images")
