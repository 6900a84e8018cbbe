"""The captions that files beside images hold: a text or JSON file of one image, a table of many."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from mlcd.errors import InvalidInput

SIDECARS: Final = (".json", ".txt")  # the first that states a caption counts
TABLES: Final = tuple(
    name + suffix for name in ("captions", "metadata", "labels") for suffix in (".jsonl", ".csv")
)
CAPTION_COLUMNS: Final = ("captions", "caption", "text")  # the first that is there counts
MAX_BYTES: Final = 1 << 24  # of a file beside one image
_PATH_COLUMNS: Final = ("path", "file_name", "image", "key")


def captions_beside(suffix: str, data: bytes, item: str) -> list[str]:
    """Returns the captions in the file of one image: one a line in .txt; in .json the field
    `captions` or `caption`, where there is one.

    Raises InvalidInput naming `item` where they cannot be read.
    """
    if len(data) > MAX_BYTES:
        raise InvalidInput(
            f"{item}{suffix} has more than {MAX_BYTES} bytes",
            remedy="a file beside an image holds its captions",
        )
    try:
        text = data.decode("utf-8-sig")
        facts = json.loads(text) if suffix == ".json" else {"captions": text.split("\n")}
    except (ValueError, RecursionError) as error:
        kind = "JSON" if suffix == ".json" else "text"
        raise InvalidInput(f"{item}{suffix} is not {kind} in UTF-8", remedy="mend it") from error
    return captions_among(facts, item + suffix) if isinstance(facts, dict) else []


def captions_in_table(name: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields a path, relative to the table's folder, and a caption of it, from the lines of a
    table in CSV or JSON lines. A path may have several rows.
    """
    rows = map(json.loads, lines) if name.endswith(".jsonl") else csv.DictReader(lines)
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            item = f"{name}, row {number},"
            if not isinstance(row, dict):
                raise InvalidInput(f"{item} is no object", remedy="give an object in each line")
            for caption in captions_among(row, item):
                yield _path(row, item), caption
    except (ValueError, RecursionError, csv.Error) as error:
        raise InvalidInput(
            f"{name} cannot be read after row {number}", remedy="mend it, in UTF-8"
        ) from error


def captions_among(facts: Mapping[str, Any], item: str) -> list[str]:
    """Returns the captions that the facts of an image state, without empty ones."""
    column = next((column for column in CAPTION_COLUMNS if column in facts), None)
    return [] if column is None else captions_of(facts[column], item)


def captions_of(value: Any, item: str) -> list[str]:
    """Returns the captions in a text, a list of texts or None, without empty ones."""
    texts = value if isinstance(value, list) else [value]
    return [text for each in texts if each is not None if (text := _checked(each, item).strip())]


def _checked(text: Any, item: str) -> str:
    try:
        if isinstance(text, str):
            text.encode()  # half a surrogate pair, which JSON can state, is no text
            return text
    except UnicodeEncodeError:
        pass
    raise InvalidInput(f"a caption of {item} is no text", remedy="give texts in UTF-8")


def _path(row: Mapping[str, Any], item: str) -> str:
    path = next((row[column] for column in _PATH_COLUMNS if row.get(column)), None)
    if not isinstance(path, str):
        raise InvalidInput(
            f"{item} names no image",
            remedy=f"give the image's path in a column {', '.join(_PATH_COLUMNS)}",
        )
    return path
