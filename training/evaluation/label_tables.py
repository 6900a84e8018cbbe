"""Tables of images with several labels each, such as the objects in a photograph."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import InvalidInput, NotFound
from mlcd.images.matched_keys import match_keys
from mlcd.keys import normalize_class
from mlcd.text_tables import decode_text, join_columns, json_rows, split_lines
from mlcd.types import SampleKey

# A label that counts neither as present nor as absent, such as VOC's "difficult" objects.
DIFFICULT: Final = -1
_FORM: Final = 'give a line {"path": "a.jpg", "labels": ["cat"], "difficult": []} for each image'


@dataclass(frozen=True)
class SeveralLabels:
    """The labels of N images.

    names: the A labels, sorted. tags: int8 [N, A], 1 if an image has a label, 0 if not, DIFFICULT
    to ignore. sha256: digest of the file.
    """

    keys: tuple[SampleKey, ...]
    names: tuple[str, ...]
    tags: NDArray[np.int8]
    sha256: str

    def of(self, keys: Sequence[SampleKey]) -> NDArray[np.int8]:
        """Returns the tags of the images `keys`; the table may spell the keys differently."""
        return self.tags[match_keys(keys, self.keys, "the table of labels").indices]


def read_labels(path: Path) -> SeveralLabels:
    """Reads a .jsonl of images. Raises NotFound, or InvalidInput naming the invalid line."""
    if not path.is_file():
        raise NotFound(f"no table of labels at {path}", remedy=_FORM)
    data = path.read_bytes()
    labels_of: dict[SampleKey, tuple[list[str], list[str]]] = {}
    for number, row in json_rows(str(path), split_lines(decode_text(data, str(path)))):
        try:
            key, labels, difficult = _parse_row(row)
        except (KeyError, TypeError) as error:
            columns = f" (it has {join_columns(tuple(row))})" if isinstance(row, dict) else ""
            raise InvalidInput(
                f"{path}, line {number} needs the fields of a table of labels{columns}",
                remedy=_FORM,
            ) from error
        if key in labels_of:
            raise InvalidInput(f"{path}, line {number}: {key} is already in an earlier line")
        labels_of[key] = labels, difficult
    names = sorted({name for labels, _ in labels_of.values() for name in labels})
    if not names:
        raise InvalidInput(f"{path}: at least one image needs a label", remedy=_FORM)
    column_of = {name: number for number, name in enumerate(names)}
    tags = np.zeros((len(labels_of), len(names)), dtype=np.int8)
    for row, (labels, difficult) in enumerate(labels_of.values()):
        tags[row, [column_of[name] for name in difficult if name in column_of]] = DIFFICULT
        # If an image has both an easy and a difficult object of a class, it has the label.
        tags[row, [column_of[name] for name in labels]] = 1
    return SeveralLabels(tuple(labels_of), tuple(names), tags, hashlib.sha256(data).hexdigest())


def _parse_row(row: dict[str, Any]) -> tuple[SampleKey, list[str], list[str]]:
    key, labels, difficult = row["path"], row["labels"], row.get("difficult", [])
    texts = (key, *labels, *difficult)
    if not isinstance(labels, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    return key, [normalize_class(name) for name in labels], list(map(normalize_class, difficult))
