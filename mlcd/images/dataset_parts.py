"""The parts of a data set that the names of its files state, as Hugging Face's hub does."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

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
    """Returns the name of the folder that such a part would be."""
    return _PARTS.get(name, name)


def part_of_files(paths: Sequence[str]) -> dict[str, str]:
    """Returns the part that each file is, by its name or else by its folder's.

    It is empty unless two parts are named: one part alone splits nothing.
    """
    found = {path: part for path in paths if (part := _part(PurePosixPath(path))) is not None}
    return found if len(set(found.values())) > 1 else {}


def _part(path: PurePosixPath) -> str | None:
    names = (path.stem, path.parent.name)
    first = next((match for name in names if (match := _FIRST.match(name.lower()))), None)
    return None if first is None else _PARTS[first[1]]
