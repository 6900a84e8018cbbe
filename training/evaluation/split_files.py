"""Splits as data sets publish them: a JSON file with the keys of each part, or of several folds."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput, NotFound
from mlcd.types import SampleKey
from training.evaluation.labeled_rows import LabeledRows
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

    def parts(self, samples: LabeledRows) -> Iterator[LabeledRows]:
        """Yields the samples of each fold with the split; samples in no part are left out.

        Raises InvalidInput for a key of no sample, and for one in two parts.
        """
        row_of = {key: row for row, key in enumerate(samples.keys)}
        plain = replace(samples, given=None)
        known = [] if self.validation is None else [*self.validation]
        for fold in self.folds:
            _check_distinct([*fold, *known, *self.test])
            train, test = (_rows(keys, row_of) for keys in (fold, self.test))
            validation = None if self.validation is None else _rows(known, row_of)
            yield of_parts(
                selected(plain, train),
                None if validation is None else selected(plain, validation),
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


def _rows(keys: Sequence[SampleKey], row_of: dict[SampleKey, int]) -> NDArray[np.int64]:
    missing = [key for key in keys if key not in row_of]
    if missing:
        raise InvalidInput(
            f"{missing[0]!r} of the split is the key of no image that can be used ({len(missing)} "
            f"of {len(keys)} keys)",
            remedy="are these the images that the split was made for?",
        )
    return np.array([row_of[key] for key in keys], dtype=np.int64)
