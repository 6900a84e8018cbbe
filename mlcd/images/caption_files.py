"""Reads captions from files beside images: a text or JSON file per image, or a table of many."""

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

from mlcd.errors import InvalidInput
from mlcd.images.names import printable
from mlcd.text_tables import csv_rows, decode_text, join_columns, json_rows, open_text, split_lines

SIDECARS: Final = (".json", ".txt")  # the first file with a caption is used
TABLES: Final = tuple(
    name + suffix for name in ("captions", "metadata", "labels") for suffix in (".jsonl", ".csv")
)
TABLES_OF_CAPTIONS: Final = "captions."  # tables with other names may lack captions
CAPTION_COLUMNS: Final = ("captions", "caption", "text")  # the first existing column is used
MAX_BYTES: Final = 1 << 24  # per caption file of one image
_PATH_COLUMNS: Final = ("path", "file_name", "image", "key")


def captions_beside(suffix: str, data: bytes, item: str) -> list[str]:
    """Returns the captions in the file of one image: the lines of .txt; in .json the first field of
    `CAPTION_COLUMNS`, if any.

    Raises InvalidInput naming `item` if they cannot be read.
    """
    if len(data) > MAX_BYTES:
        raise InvalidInput(
            f"{item}{suffix} has more than {MAX_BYTES} bytes",
            remedy="a file beside an image holds its captions",
        )
    text = decode_text(data, item + suffix)
    if suffix != ".json":
        return captions_among({"captions": split_lines(text)}, item + suffix)
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{item}{suffix} is not JSON", remedy="fix the file") from error
    return captions_among(facts, item + suffix) if isinstance(facts, dict) else []


def captions_in_table(
    name: str, file: IO[bytes], *, is_of_captions: bool = True
) -> Iterator[tuple[str, str]]:
    """Yields (image path relative to the table's folder, caption) from an open table in CSV or JSON
    lines. A path may have several rows.

    is_of_captions: whether the table must contain captions. Raises InvalidInput if captions are
    required and missing, and for the first row that cannot be read.
    """
    columns: tuple[str, ...] = ()
    is_captioned = False
    for number, row in _rows(name, file):
        item = f"{name}, line {number},"
        if not isinstance(row, dict):
            raise InvalidInput(
                f"{item} must be a JSON object", remedy="give an object in each line"
            )
        columns = columns or tuple(row)
        if any(column in row for column in CAPTION_COLUMNS):
            is_captioned = True
            for caption in captions_among(row, item):
                yield _path(row, item), caption
    is_separated_otherwise = len(columns) == 1 and any(mark in columns[0] for mark in ";\t")
    if columns and not is_captioned and (is_of_captions or is_separated_otherwise):
        raise InvalidInput(
            f"{name} must hold captions, got the columns {join_columns(columns)}",
            remedy=f"give a path in one of {', '.join(_PATH_COLUMNS)} and a text in "
            f"one of {', '.join(CAPTION_COLUMNS)}, separated by commas",
        )


def _rows(name: str, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    with open_text(file, name) as lines:
        if name.endswith(".jsonl"):
            yield from json_rows(name, lines)
            return
        rows = csv_rows(name, lines)
        _, header = next(rows, (0, []))
        for number, row in rows:
            yield number, dict(zip(header, row, strict=True))


def captions_among(facts: Mapping[str, Any], item: str) -> list[str]:
    """Returns the nonempty captions among the fields of an image."""
    column = next((column for column in CAPTION_COLUMNS if column in facts), None)
    return [] if column is None else captions_of(facts[column], item)


def captions_of(value: Any, item: str) -> list[str]:
    """Returns the nonempty captions in a text, a list of texts or None."""
    texts = value if isinstance(value, list) else [value]
    return [
        caption
        for value in texts
        if value is not None
        if (caption := _check_text(value, item).strip())
    ]


def _check_text(text: Any, item: str) -> str:
    try:
        if isinstance(text, str):
            text.encode()  # JSON can contain half a surrogate pair
            return text
    except UnicodeEncodeError:
        pass
    raise InvalidInput(
        f"a caption must be text, got another value in {item}", remedy="give texts in UTF-8"
    )


def _path(row: Mapping[str, Any], item: str) -> str:
    path = next((row[column] for column in _PATH_COLUMNS if row.get(column)), None)
    try:
        if isinstance(path, str):
            return printable(path)
    except UnicodeEncodeError:
        pass
    raise InvalidInput(
        f"{item} must name an image, got the columns {join_columns(tuple(row))}",
        remedy=f"give the image's path in a column {', '.join(_PATH_COLUMNS)}",
    )
