"""The evaluation images, of classes that pre-training never saw, with the sets' own splits.

Each set is cut to at most so many known and test images per class, by the hash of the key. It is
kept as a zip of its files (so that `mlcd embed` reads it too) with a table of splits and labels,
and as pixels of the model's size.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput
from mlcd.images.entries import Entry
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.keys import HELD_OUT_FRACTION, mask_held_out, split_positions
from mlcd.training.evaluation.splits import LabeledRows
from studies.losses.archive import write_zip
from studies.losses.tiers import Tier

PRETRAIN: Final = "pretrain"
FASHION: Final = "fashion_products"
SINGLE_LABEL: Final = ("tiny_imagenet_30", "cifar10_jpg", "caltech101_20")
FASHION_TASKS: Final = ("articleType", "baseColour", "gender")
_FACETS: Final = ("gender", "masterCategory", "subCategory", "articleType", "baseColour")
_TEST_SPLITS: Final = ("test", "val")
# known images of a class, so that the probe's train and validation parts have some
_MIN_KNOWN: Final = 8
MIN_TAGGED: Final = 25  # known images with an attribute for it to count in the multi-label mAP


@dataclass(frozen=True)
class EvaluationSet:
    """One set of evaluation images.

    keys, test (bool): N each. columns: N labels for each task or facet. location: a source that
    mlcd reads.
    """

    name: str
    location: str
    keys: tuple[str, ...]
    test: NDArray[np.bool_]
    columns: Mapping[str, tuple[str, ...]]

    @property
    def tasks(self) -> tuple[str, ...]:
        return FASHION_TASKS if self.name == FASHION else tuple(self.columns)

    def samples(self, task: str, rows: NDArray[np.float32]) -> LabeledRows:
        """Returns the samples whose class has a few known and at least one test image, with the
        set's split.
        """
        classes = np.array(self.columns[task])
        counts = {
            name: int((classes[~self.test] == name).sum())
            for name in set(classes[self.test].tolist())
        }
        chosen = np.array([counts.get(name, 0) >= _MIN_KNOWN for name in classes.tolist()])
        keys = [key for key, use in zip(self.keys, chosen.tolist(), strict=True) if use]
        names = classes[chosen].tolist()
        return LabeledRows(rows[chosen], keys, split_of(keys, names, self.test[chosen]), names)

    def tags(self) -> tuple[tuple[str, ...], NDArray[np.bool_]]:
        """Returns (names, bool [N, A]) for every facet's value with enough known and at least one
        test image.
        """
        names, columns = [], []
        for facet in _FACETS:
            values = np.array(self.columns[facet])
            for value in sorted(set(values.tolist())):
                tagged = values == value
                if (
                    tagged[~self.test].sum() >= MIN_TAGGED
                    and tagged[self.test].any()
                    and not tagged.all()
                ):
                    names.append(f"{facet}={value}")
                    columns.append(tagged)
        return tuple(names), np.stack(columns, axis=1)


def split_of(
    keys: Sequence[str], classes: Sequence[str], test: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Returns positions in (0, 1), as `mlcd.keys` does, that hold out just the test images.

    The hold-out is HELD_OUT_FRACTION.
    """
    positions = np.empty(len(keys))
    for part, start, width in (
        (test, 0.0, HELD_OUT_FRACTION),
        (~test, HELD_OUT_FRACTION, 1 - HELD_OUT_FRACTION),
    ):
        rows = np.flatnonzero(part).tolist()
        within = split_positions([keys[row] for row in rows], [classes[row] for row in rows])
        positions[rows] = start + width * within
    return positions


def open_sets(root: Path, state: Path, tier: Tier) -> Iterator[EvaluationSet]:
    """Yields all sets but the pre-training one, made on first use."""
    for name in SINGLE_LABEL:
        listed = partial(_listed, root / name, "label", tier.known_per_class, tier.test_per_class)
        yield _open_copied(state, name, listed)
    fashion = partial(
        _listed,
        root / FASHION,
        "gender",
        tier.fashion_known_per_gender,
        tier.fashion_test_per_gender,
    )
    yield _open_copied(state, FASHION, fashion)


def open_pretraining(images: str, state: Path, tier: Tier) -> EvaluationSet:
    """Opens held-out photographs of the pre-training set, and trained ones to vote for them."""

    def listed() -> "_Listing":
        entries = open_source(images).entries
        classes = [str(entry.class_name) for entry in entries]
        test = mask_held_out(split_positions([entry.key for entry in entries], classes))
        rows = [
            _Row(entry.key, entry, is_test, {"class": name})
            for entry, is_test, name in zip(entries, test.tolist(), classes, strict=True)
        ]
        return _Listing(
            images,
            _capped(rows, "class", tier.pretrain_known_per_class, tier.pretrain_test_per_class),
        )

    return _opened(_table(state, PRETRAIN, listed), PRETRAIN, images)


def pixels(images: EvaluationSet, state: Path, size: int) -> NDArray[np.uint8]:
    """Returns uint8 [N, 3, size, size] as a tower of that size takes them; kept on disk, read on
    use.
    """
    path = state / "sets" / f"{images.name}-{size}.npy"
    if not path.is_file():
        spec = PreprocessSpec(resize_shortest=size, crop=size)
        source = open_source(images.location)
        entries = {entry.key: entry for entry in source.entries}
        stacked = np.stack([spec.prepare(source.read(entries[key])) for key in images.keys])
        written = path.with_suffix(".partial.npy")
        np.save(written, stacked, allow_pickle=False)
        written.rename(path)
    found: NDArray[np.uint8] = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


@dataclass(frozen=True)
class _Row:
    key: str
    entry: Entry
    test: bool
    labels: Mapping[str, str]


@dataclass(frozen=True)
class _Listing:
    location: str
    rows: Sequence[_Row]


def _listed(folder: Path, capped_by: str, num_known: int, num_test: int) -> _Listing:
    """Returns the rows of labels.csv with their labels, cut to so many per value of one column."""
    by_key = {entry.key: entry for entry in open_source(str(folder)).entries}
    with (folder / "labels.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    names = ("label",) if "label" in lines[0] else _FACETS
    rows = [
        _Row(
            line["path"],
            by_key[line["path"]],
            line["split"] in _TEST_SPLITS,
            {name: line[name] for name in names},
        )
        for line in lines
        if line["path"] in by_key
    ]
    if not rows:
        raise InvalidInput(f"labels.csv of {folder.name} names none of its images")
    return _Listing(str(folder), _capped(rows, capped_by, num_known, num_test))


def _capped(rows: Sequence[_Row], column: str, num_known: int, num_test: int) -> list[_Row]:
    chosen = []
    for test, most in ((False, num_known), (True, num_test)):
        part = [row for row in rows if row.test == test]
        classes = [row.labels[column] for row in part]
        positions = split_positions([row.key for row in part], classes)
        counts = {name: classes.count(name) for name in set(classes)}
        chosen += [
            row
            for row, position, name in zip(part, positions.tolist(), classes, strict=True)
            if position * counts[name] < most
        ]
    return chosen


def _open_copied(state: Path, name: str, listed: Callable[[], _Listing]) -> EvaluationSet:
    """Opens the images as a zip beside the table."""
    archive = state / "sets" / f"{name}.zip"
    if not archive.is_file():
        archive.parent.mkdir(parents=True, exist_ok=True)
        listing = listed()
        source = open_source(listing.location)
        files = ((row.key, source.read(row.entry)) for row in listing.rows)
        write_zip(archive, files)
    return _opened(_table(state, name, listed), name, str(archive))


def _table(state: Path, name: str, listed: Callable[[], _Listing]) -> dict[str, Any]:
    path = state / "sets" / f"{name}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = listed().rows
        fields = {
            "keys": [row.key for row in rows],
            "test": [row.test for row in rows],
            "columns": {column: [row.labels[column] for row in rows] for column in rows[0].labels},
        }
        written = path.with_suffix(".partial")
        written.write_text(json.dumps(fields))
        written.rename(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _opened(table: dict[str, Any], name: str, location: str) -> EvaluationSet:
    columns = {column: tuple(values) for column, values in table["columns"].items()}
    return EvaluationSet(name, location, tuple(table["keys"]), np.array(table["test"]), columns)
