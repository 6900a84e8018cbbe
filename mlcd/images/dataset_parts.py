"""Finds the parts of a data set (train, val, test) from file names, like Hugging Face's hub."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from mlcd.locations import is_url

_PARTS: Final = {
    "train": "train",
    "validation": "val",
    "valid": "val",
    "val": "val",
    "dev": "val",
    "test": "test",
}
_FIRST: Final = re.compile(rf"({'|'.join(_PARTS)})(?![a-z])")


def part_folder(name: str) -> str:
    """Returns the folder name of a part, such as val for validation."""
    return _PARTS.get(name, name)


def parts_of_classes(class_names: Iterable[str]) -> dict[str, str]:
    """Returns the part of each top folder of the classes' paths: train, val or test.

    It is empty unless two folders are parts: a single one may be a class, such as a railway train.
    Folders without sub-folders are parts only if every top folder has the name of a part.
    """
    folders = [name.partition("/") for name in class_names]
    alone = {first for first, slash, _ in folders if not slash}
    part_of = {first: part for first, _, _ in folders if (part := _PARTS.get(first.lower()))}
    if any(first not in part_of for first in alone):
        part_of = {first: part for first, part in part_of.items() if first not in alone}
    return part_of if len(part_of) > 1 else {}


def describe_parts(location: str, parts: Mapping[str, str]) -> str:
    """Returns the sentence that says which folders of a place are parts of a data set."""
    return f"the folders {', '.join(sorted(parts))} of {location} are parts of a data set"


def propose_parts(location: str, parts: Mapping[str, str]) -> str:
    """Returns the remedy for images whose folders are parts: the options that give them apart."""
    names = {part: folder for folder, part in parts.items()}
    if "train" not in names:
        return "give the two sides with --train and --test"
    train, test = names["train"], names.get("test") or names["val"]
    if not is_url(location) and not (Path(location) / train).is_dir():
        return "give the files of each part with --train and --test"
    sides = (f"{option} {location.rstrip('/')}/{name}" for option, name in
             (("--train", train), ("--test", test)))  # fmt: skip
    return f"give {' '.join(sides)}"


def part_of_files(paths: Sequence[str]) -> dict[str, str]:
    """Returns the part of each file, from the file's name or else its folder's.

    The result is empty unless the names give at least two parts.
    """
    part_of = {path: part for path in paths if (part := _part(PurePosixPath(path))) is not None}
    return part_of if len(set(part_of.values())) > 1 else {}


def _part(path: PurePosixPath) -> str | None:
    names = (path.stem, path.parent.name)
    first = next((match for name in names if (match := _FIRST.match(name.lower()))), None)
    return None if first is None else _PARTS[first[1]]
