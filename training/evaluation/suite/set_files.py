"""Finds the files of data sets, and checks that they are complete.

    DATA/food101/train/apple_pie/*.jpg   images by class, of train and test, and of val if any
    DATA/food101/test/apple_pie/*.jpg
    DATA/food101.zip                     the same in an archive
    DATA/food101/data/train-*.parquet    the layout of Hugging Face's hub, with the column label
    DATA/food101/dataset_dict.json       the layout of Hugging Face's save_to_disk
    DATA/voc2007/labels.jsonl            several labels per image: path, labels, difficult
    DATA/splits/food101.json             the parts by keys ("train", "val", "test", or "folds"), and
                                         the names of classes by folder ("names")
    DATA/splits/food101.sha256           SHA-256 and key of each image, as sha256sum writes them

Any other folder of DATA is a data set of the user, without a definition to check.
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
from mlcd.training.evaluation.label_tables import SeveralLabels
from mlcd.training.evaluation.splits import SplitFile, folder_split, key_split, read_split
from mlcd.training.evaluation.suite.definitions import SETS, DataSet
from mlcd.training.evaluation.texts.class_names import NameTable, check_table, table_of_set
from mlcd.types import SampleKey

LABELS: Final = "labels.jsonl"
_SPLITS: Final = "splits"
_ARCHIVES: Final = (".zip", ".parquet")
_HASH_LINE: Final = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")
_PARTS: Final = ("train", "folds")


@dataclass(frozen=True)
class FoundSet:
    """A data set that is present.

    definition: None for a user's data set. images: folder or archive. split: None uses the split of
    the folders. names: class names; None uses the folders' names. labels: table of several labels
    per image; None if images have classes. hashes: file of SHA-256 checksums, if any.
    """

    name: str
    definition: DataSet | None
    images: Path
    split: SplitFile | None
    names: NameTable | None
    labels: Path | None
    hashes: Path | None


def find_sets(data: Path) -> list[FoundSet]:
    """Returns the data sets in a folder: CLIP's in the order of its table, then the user's.

    Raises InvalidInput for a damaged split file.
    """
    present = {
        path.name if path.is_dir() else path.stem: path
        for path in sorted(data.iterdir())
        if path.name != _SPLITS
        and not path.name.startswith(".")
        and (path.is_dir() or path.suffix in _ARCHIVES)
    }
    published = [name for name in SETS if name in present]
    user_sets = [name for name in present if name not in SETS]
    return [_describe_set(data, name, present[name]) for name in (*published, *user_sets)]


def _describe_set(data: Path, name: str, images: Path) -> FoundSet:
    file = data / _SPLITS / f"{name}.json"
    content = _read_object(file) if file.is_file() else {}
    names = table_of_set(name) if name in SETS else None
    labels, hashes = images / LABELS, data / _SPLITS / f"{name}.sha256"
    return FoundSet(
        name,
        SETS.get(name),
        images,
        read_split(file) if any(part in content for part in _PARTS) else None,
        check_table(file, content["names"]) if "names" in content else names,
        labels if labels.is_file() and _has_several(name) else None,
        hashes if hashes.is_file() else None,
    )


def _has_several(name: str) -> bool:
    return name in SETS and SETS[name].metric == "map-11"


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not JSON", remedy="restore it") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} must be a JSON object", remedy="restore it")
    return content


def check_set(data_set: FoundSet, source: Source, labels: SeveralLabels | None) -> None:
    """Raises InvalidInput naming what differs from the data set's definition.

    A user's data set is not checked.
    """
    if (definition := data_set.definition) is None:
        return
    if definition.metric == "map-11" and labels is None:
        raise InvalidInput(
            f"{data_set.name} requires {LABELS}", remedy="add it: its images have several labels"
        )
    if definition.folds > 1 and data_set.split is None:
        raise InvalidInput(
            f"{data_set.name} requires its {definition.folds} official folds",
            remedy=f"give them in {_SPLITS}/{data_set.name}.json",
        )
    for part, classes in _parts(data_set, source, labels).items():
        num = len(set(classes) if labels is None else labels.names)
        if num != definition.classes:
            raise InvalidInput(
                f"{part} of {data_set.name} must have {definition.classes} classes, got {num}",
                remedy="restore the missing classes",
            )
        expected = definition.test if part == "test" else definition.train
        if len(classes) != expected:
            raise InvalidInput(
                f"{part} of {data_set.name} must have {expected} images, got {len(classes)}",
                remedy=f"restore the missing images. {definition.trap}".strip(),
            )


def check_hashes(data_set: FoundSet, digests: Mapping[SampleKey, bytes]) -> None:
    """Raises InvalidInput naming an image whose checksum differs from the data set's.

    digests: of the images that can be decoded. Images without a checksum are not checked.
    """
    if data_set.hashes is None:
        return
    text = decode_text(data_set.hashes.read_bytes(), str(data_set.hashes))
    spelled = Spellings(digests)
    for number, line in enumerate(split_lines(text), 1):
        if (match := _HASH_LINE.fullmatch(line)) is None:
            raise InvalidInput(
                f"line {number} of {data_set.hashes} must be a SHA-256 and a path",
                remedy="write it with sha256sum in the data set's folder",
            )
        digest, key = match.groups()
        if (image_key := spelled.find(key)) is None:
            raise InvalidInput(
                f"{data_set.name} lacks a usable image {key}, which {data_set.hashes.name} lists",
                remedy="restore it, or give the checksums of this split",
            )
        if digests[image_key].hex() != digest:
            raise InvalidInput(
                f"{key} of {data_set.name} does not match its checksum in {data_set.hashes.name}",
                remedy="restore it",
            )


def _parts(
    data_set: FoundSet, source: Source, labels: SeveralLabels | None
) -> dict[str, list[str]]:
    """Returns the classes of the images of each part; "" for an image with several labels.

    Validation images count as train. Raises InvalidInput if neither folders nor a file set the
    parts.
    """
    if labels is None:
        entries = [entry for entry in source.entries if entry.class_name is not None]
        keys, names = [entry.key for entry in entries], [str(entry.class_name) for entry in entries]
        split, names = folder_split(names) or (None, names)
    else:
        keys, names = list(labels.keys), [""] * len(labels.keys)
        split = key_split(keys)
    if data_set.split is not None:
        class_of = dict(zip(keys, names, strict=True))
        return {
            part: _match_classes(data_set, part, part_keys, class_of)
            for part, part_keys in _keys_of_parts(data_set.split).items()
        }
    if split is None:
        raise InvalidInput(
            f"{data_set.name} requires folders train and test",
            remedy=f"make them, or give {_SPLITS}/{data_set.name}.json",
        )
    masks = {"train": split.known, "test": split.test}
    return {
        part: [names[row] for row in np.flatnonzero(mask).tolist()] for part, mask in masks.items()
    }


def _keys_of_parts(split: SplitFile) -> dict[str, tuple[SampleKey, ...]]:
    trained = {
        "train" if len(split.folds) == 1 else f"fold {number}": (*fold, *(split.validation or ()))
        for number, fold in enumerate(split.folds, 1)
    }
    return {**trained, "test": split.test}


def _match_classes(
    data_set: FoundSet, part: str, keys: Sequence[SampleKey], class_of: Mapping[SampleKey, str]
) -> list[str]:
    matched = match_keys(keys, list(class_of), f"{part} of {data_set.name}")
    if matched.unmatched.num:
        raise InvalidInput(
            f"{part} of {data_set.name} names {matched.unmatched.first}, which is not there "
            f"({matched.unmatched.num} of {matched.unmatched.num_keys} keys)",
            remedy="give the split that was made for these files",
        )
    names = list(class_of.values())
    return [names[index] for index in matched.indices.tolist()]
