"""Splits as data sets publish them: a JSON file with the keys of each part, or of several folds."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.errors import InvalidInput, NotFound
from mlcd.types import SampleKey
from training.evaluation.labeled_rows import LabeledRows
from training.evaluation.listed_keys import ListedKeys
from training.evaluation.sides import of_parts, selected

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
        plain = replace(samples, given=None)
        known = [] if self.validation is None else [*self.validation]
        for fold in self.folds:
            keys = [*fold, *known, *self.test]
            _check_distinct(keys)
            # all together, so that two spellings of one key are not in two parts
            listed = ListedKeys(keys, "the split", may_be_unmatched)
            indices = listed.indices(samples.keys, "those that can be used")
            ends = [len(fold), len(fold) + len(known)]
            train, validation, test = (part[part >= 0] for part in np.split(indices, ends))
            if not len(train) or not len(test):
                raise InvalidInput(
                    "a part of the split has no image that can be used",
                    remedy="are these the images that the split was made for?",
                )
            yield of_parts(
                selected(plain, train),
                None if self.validation is None else selected(plain, validation),
                selected(plain, test),
            )


def read_split(path: Path) -> SplitFile:
    """Reads a split. Raises NotFound, or InvalidInput for a file of another form."""
    if not path.is_file():
        raise NotFound(f"there is no split {path}", remedy=_FORM)
    data = path.read_bytes()
    try:
        stated = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON", remedy=_FORM) from error
    if not isinstance(stated, dict) or ("train" in stated) == ("folds" in stated):
        raise InvalidInput(f"{path} is no split", remedy=_FORM)
    folds = stated["folds"] if "folds" in stated else [stated["train"]]
    validation = stated.get("val")
    if not isinstance(folds, list) or not folds:
        raise InvalidInput(f"{path} has no folds", remedy=_FORM)
    return SplitFile(
        tuple(_keys(path, "a training part", fold) for fold in folds),
        None if validation is None else _keys(path, "val", validation),
        _keys(path, "test", stated.get("test")),
        hashlib.sha256(data).hexdigest(),
    )


def _keys(path: Path, part: str, value: Any) -> tuple[SampleKey, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(key, str) for key in value):
        raise InvalidInput(f"{path}: {part} is no list of keys", remedy=_FORM)
    return tuple(value)


def _check_distinct(keys: Sequence[SampleKey]) -> None:
    (key, num), *_ = Counter(keys).most_common(1)
    if num > 1:
        raise InvalidInput(f"{key} is in two parts of the split", remedy="test on other images")
