"""The places of a data set's files, and the check that they are all of them.

    DATA/food101/train/apple_pie/*.jpg   images by class, of train and test, and of val if there is
    DATA/food101/test/apple_pie/*.jpg
    DATA/food101.zip                     the same in an archive
    DATA/food101/data/train-*.parquet    as Hugging Face's hub has it, with the column label
    DATA/food101/dataset_dict.json       as its save_to_disk writes it
    DATA/voc2007/labels.jsonl            of several labels an image: path, labels, difficult
    DATA/splits/food101.json             the parts by keys ("train", "val", "test", or "folds"), and
                                         the names of classes by folder ("names")
    DATA/splits/food101.sha256           SHA-256 and key of each image, as sha256sum writes them

Any other folder of DATA is a data set of the user's own, of which nothing is known.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlcd.errors import InvalidInput
from mlcd.images.matched_keys import match_keys
from mlcd.images.sidecars import Spellings
from mlcd.images.source import Source
from mlcd.text_tables import decode_text, split_lines
from mlcd.types import SampleKey
from training.evaluation.label_tables import SeveralLabels
from training.evaluation.splits import SplitFile, folder_split, key_split, read_split
from training.evaluation.suite.definitions import SETS, DataSet
from training.evaluation.texts.class_names import NameTable, checked_table, table_of_set

LABELS: Final = "labels.jsonl"
_SPLITS: Final = "splits"
_ARCHIVES: Final = (".zip", ".parquet")
_HASH_LINE: Final = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")
_PARTS: Final = ("train", "folds")


@dataclass(frozen=True)
class FoundSet:
    """A data set that is there.

    definition: None for one of the user's own. images: its folder or archive. split: None for the
    split of its folders. names: None for those of the folders. labels: None if images have classes.
    """

    name: str
    definition: DataSet | None
    images: Path
    split: SplitFile | None
    names: NameTable | None
    labels: Path | None
    hashes: Path | None


def find_sets(data: Path) -> list[FoundSet]:
    """Returns the data sets below a folder: those of CLIP in the order of its table, then others.

    Raises InvalidInput for a damaged file of splits.
    """
    there = {
        path.name if path.is_dir() else path.stem: path
        for path in sorted(data.iterdir())
        if path.name != _SPLITS
        and not path.name.startswith(".")
        and (path.is_dir() or path.suffix in _ARCHIVES)
    }
    known = [name for name in SETS if name in there]
    others = [name for name in there if name not in SETS]
    return [_found(data, name, there[name]) for name in (*known, *others)]


def _found(data: Path, name: str, images: Path) -> FoundSet:
    file = data / _SPLITS / f"{name}.json"
    stated = _stated(file) if file.is_file() else {}
    names = table_of_set(name) if name in SETS else None
    labels, hashes = images / LABELS, data / _SPLITS / f"{name}.sha256"
    return FoundSet(
        name,
        SETS.get(name),
        images,
        read_split(file) if any(part in stated for part in _PARTS) else None,
        checked_table(file, stated["names"]) if "names" in stated else names,
        labels if labels.is_file() and _has_several(name) else None,
        hashes if hashes.is_file() else None,
    )


def _has_several(name: str) -> bool:
    return name in SETS and SETS[name].metric == "map-11"


def _stated(file: Path) -> dict[str, Any]:
    try:
        stated = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not JSON", remedy="restore it") from error
    if not isinstance(stated, dict):
        raise InvalidInput(f"{file} is no object", remedy="restore it")
    return stated


def check_set(found: FoundSet, source: Source, labels: SeveralLabels | None) -> None:
    """Raises InvalidInput naming what differs from the data set's definition.

    Nothing is known of a data set of the user's own.
    """
    if (definition := found.definition) is None:
        return
    if definition.metric == "map-11" and labels is None:
        raise InvalidInput(f"{found.name} has no {LABELS}", remedy="its images have several labels")
    if definition.folds > 1 and found.split is None:
        raise InvalidInput(
            f"{found.name} has {definition.folds} official folds",
            remedy=f"give them in {_SPLITS}/{found.name}.json",
        )
    for part, classes in _parts(found, source, labels).items():
        num = len(set(classes) if labels is None else labels.names)
        if num != definition.classes:
            raise InvalidInput(
                f"{part} of {found.name} has {num} classes, not {definition.classes}",
                remedy="is a class missing?",
            )
        expected = definition.test if part == "test" else definition.train
        if len(classes) != expected:
            raise InvalidInput(
                f"{part} of {found.name} has {len(classes)} images, not {expected}",
                remedy=f"is anything missing? {definition.trap}".strip(),
            )


def check_hashes(found: FoundSet, digests: Mapping[SampleKey, bytes]) -> None:
    """Raises InvalidInput naming an image whose bytes are not those that the data set states.

    digests: of the images that can be used. Images of which nothing is stated are not checked.
    """
    if found.hashes is None:
        return
    text = decode_text(found.hashes.read_bytes(), str(found.hashes))
    spelled = Spellings(digests)
    for number, line in enumerate(split_lines(text), 1):
        if (stated := _HASH_LINE.fullmatch(line)) is None:
            raise InvalidInput(
                f"line {number} of {found.hashes} is no SHA-256 and path",
                remedy="write it by sha256sum in the data set's folder",
            )
        digest, key = stated.groups()
        if (own := spelled.find(key)) is None:
            raise InvalidInput(
                f"{found.name} has no usable image {key}, which {found.hashes.name} states",
                remedy="restore it; is this the split that the hashes are of?",
            )
        if digests[own].hex() != digest:
            raise InvalidInput(
                f"{key} of {found.name} is another file than {found.hashes.name} states",
                remedy="restore it",
            )


def _parts(found: FoundSet, source: Source, labels: SeveralLabels | None) -> dict[str, list[str]]:
    """Returns the class of every image of each part, "" if it has several; val belongs to train.

    Raises InvalidInput if no folders and no file tell the parts.
    """
    if labels is None:
        known = [entry for entry in source.entries if entry.class_name is not None]
        keys, names = [entry.key for entry in known], [str(entry.class_name) for entry in known]
        given, names = folder_split(names) or (None, names)
    else:
        keys, names = list(labels.keys), [""] * len(labels.keys)
        given = key_split(keys)
    if found.split is not None:
        class_of = dict(zip(keys, names, strict=True))
        return {
            part: _classes(found, part, of_part, class_of)
            for part, of_part in _keys_of_parts(found.split).items()
        }
    if given is None:
        raise InvalidInput(
            f"{found.name} has no folders train and test",
            remedy=f"make them, or give {_SPLITS}/{found.name}.json",
        )
    masks = {"train": given.known, "test": given.test}
    return {
        part: [names[row] for row in np.flatnonzero(mask).tolist()] for part, mask in masks.items()
    }


def _keys_of_parts(split: SplitFile) -> dict[str, tuple[SampleKey, ...]]:
    trained = {
        "train" if len(split.folds) == 1 else f"fold {number}": (*fold, *(split.validation or ()))
        for number, fold in enumerate(split.folds, 1)
    }
    return {**trained, "test": split.test}


def _classes(
    found: FoundSet, part: str, keys: Sequence[SampleKey], class_of: Mapping[SampleKey, str]
) -> list[str]:
    matched = match_keys(keys, list(class_of), f"{part} of {found.name}")
    if matched.unmatched.num:
        raise InvalidInput(
            f"{part} of {found.name} names {matched.unmatched.first}, which is not there "
            f"({matched.unmatched.num} of {matched.unmatched.num_keys} keys)",
            remedy="was the split made for these files?",
        )
    names = list(class_of.values())
    return [names[index] for index in matched.indices.tolist()]
