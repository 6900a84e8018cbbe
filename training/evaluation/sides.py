"""The two sides of an evaluation that are given by hand: the known one and the tested one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mlcd.artifacts.copies import brought
from mlcd.artifacts.directories import Directory
from mlcd.artifacts.manifest import MANIFEST
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.keys import split_positions
from mlcd.locations import check_no_credentials, is_url
from mlcd.text_tables import decode_text, split_lines
from mlcd.types import SampleKey
from training.evaluation.labeled_rows import LabeledRows
from training.evaluation.listed_keys import ListedKeys
from training.evaluation.splits import Split, check_tested_classes

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
        return joined(selected(samples, train), selected(samples, test))


def joined(train: LabeledRows, test: LabeledRows) -> LabeledRows:
    """Returns the samples of both sides and their split. Raises InvalidInput if they do not fit."""
    return of_parts(train, None, test)


def of_parts(train: LabeledRows, validation: LabeledRows | None, test: LabeledRows) -> LabeledRows:
    """Returns the samples of all parts and their split; validation: None if it is not given.

    Raises InvalidInput if they do not fit.
    """
    if train.given is not None or test.given is not None:
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
        return str(brought(location))
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


def selected(samples: LabeledRows, rows: NDArray[np.int64]) -> LabeledRows:
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
