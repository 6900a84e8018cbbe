"""The class names from which prompts are built: from the folders, or from a table."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from mlcd.errors import InvalidInput, NotFound
from mlcd.keys import normalize_class
from mlcd.text_tables import csv_rows, decode_text
from mlcd.training.evaluation.texts.clip_prompts import set_prompts
from mlcd.training.evaluation.texts.imagenet import IMAGENET, imagenet_names

# The names of each class, by its folder.
NameTable: TypeAlias = Mapping[str, tuple[str, ...]]

# WordNet's ids of nouns, which are the class names of ImageNet's files.
_WNID: Final = re.compile(r"n\d{8}")
# Separates the synonyms of a synset. As class names, synsets cost CLIP 4 points on ImageNet
# (openai/CLIP#246).
_SYNONYMS: Final = ", "
_TABLE: Final = "give names with --names: a .json of folders to names, or a .csv of both"


def folder_of(name: str) -> str:
    """Returns the folder of the class `name`, in the layout of the suite."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def table_of_set(name: str) -> NameTable:
    """Returns CLIP's class names of a data set, by folder.

    The folder of a class with several names may be any of them; ImageNet's folders are WordNet's
    ids.
    """
    if name == IMAGENET:
        return {wnid: (name_of_class,) for wnid, name_of_class in imagenet_names().items()}
    return {
        folder_of(name_of_class): names
        for names in set_prompts()[name].classes
        for name_of_class in names
    }


def read_names(spec: str) -> NameTable:
    """Returns CLIP's class names of a data set, or the class names in a .json or .csv file.

    A .csv has a header, the folder in the first column and the name in the second; a class with
    several names has several rows. Raises NotFound or InvalidInput.
    """
    if spec in set_prompts() or spec == IMAGENET:
        return table_of_set(spec)
    path = Path(spec)
    if not path.is_file():
        raise NotFound(f"no table of names at {spec}", remedy="give a .json or .csv file")
    try:
        text = decode_text(path.read_bytes(), str(path))
        content = json.loads(text) if path.suffix == ".json" else _csv_rows(path, text)
    except (ValueError, RecursionError) as error:
        raise _invalid_table(path, error) from error
    return check_table(path, content)


def check_table(path: Path, content: Any) -> NameTable:
    """Converts content, an object of folders to names or pairs of both, to a table.

    path: origin of the content, for messages. Raises InvalidInput for invalid content, and for an
    empty name or a WordNet id or synset as a name.
    """
    try:
        rows = content if isinstance(content, list) and _are_pairs(content) else _pairs(content)
    except (TypeError, ValueError) as error:
        raise _invalid_table(path, error) from error
    table: dict[str, list[str]] = {}
    for folder, name in rows:
        table.setdefault(normalize_class(folder), []).append(normalize_class(name))
    for folder, names in table.items():
        _check_names(path, folder, names)
    return {folder: tuple(dict.fromkeys(names)) for folder, names in table.items()}


def names_of(folders: Sequence[str], table: NameTable | None) -> list[tuple[str, ...]]:
    """Returns the names of each class.

    table: None uses the folder's name, with spaces for underscores. Raises InvalidInput for a class
    without a name, for a WordNet id or synset as a name, and for two classes with the same name,
    except in a table of WordNet's ids: CLIP's table for ImageNet has such classes.
    """
    class_names = [_name_class(folder, table) for folder in folders]
    owner: dict[str, str] = {}
    for folder, names in zip(folders, class_names, strict=True):
        for name in names:
            first = owner.setdefault(name, folder)
            if first != folder and not (table and _WNID.fullmatch(folder)):
                raise InvalidInput(
                    f"classes {first} and {folder} are both called {name!r}",
                    remedy="give them different names with --names",
                )
    return class_names


def _name_class(folder: str, table: NameTable | None) -> tuple[str, ...]:
    if table is not None:
        names = table.get(folder) or table.get(folder_of(folder))
        if names is None:
            raise InvalidInput(
                f"the table lacks a name for class {folder}",
                remedy="add it; the first row of a .csv is its header",
            )
        return names
    name = " ".join(folder.rpartition("/")[2].replace("_", " ").split())
    if _WNID.search(folder) or _SYNONYMS in folder:
        raise InvalidInput(f"the class {folder} is a synset of ImageNet, not a name", remedy=_TABLE)
    if not name:
        raise InvalidInput(f"the class {folder} is not a name", remedy=_TABLE)
    return (name,)


def _check_names(path: Path, folder: str, names: Sequence[str]) -> None:
    bad = next((name for name in names if not name.strip() or _WNID.fullmatch(name)), None)
    if bad is not None:
        raise InvalidInput(
            f"{path}: {bad!r} cannot be a name of class {folder}",
            remedy="give a name in words",
        )
    joined = next((name for name in names if _SYNONYMS in name), None)
    if joined is not None and _WNID.fullmatch(folder):
        raise InvalidInput(
            f"{path}: {joined!r} lists the synonyms of {folder}",
            remedy="give one name, or each name in its own row",
        )


def _invalid_table(path: Path, error: Exception) -> InvalidInput:
    return InvalidInput(
        f"{path} is not a table of names: {error}",
        remedy='give {"folder": "name"}, ["several", "names"] where a class has them, or a .csv',
    )


def _are_pairs(rows: list[Any]) -> bool:
    return bool(rows) and all(isinstance(row, tuple) for row in rows)


def _pairs(content: Any) -> list[tuple[str, str]]:
    if not isinstance(content, dict):
        raise TypeError("it must be an object")
    return [(folder, name) for folder, value in content.items() for name in _texts(folder, value)]


def _texts(folder: str, value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{folder} needs a name")
    return names


def _csv_rows(path: Path, text: str) -> list[tuple[str, str]]:
    rows = [row for _, row in csv_rows(str(path), text.splitlines(keepends=True))][1:]
    short = next((row for row in rows if len(row) < 2), None)
    if short is not None:
        raise ValueError(f"row {short} needs a second column")
    return [(row[0], row[1].strip()) for row in rows]
