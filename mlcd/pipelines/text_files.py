"""Reads files of texts with a permanent key for each: .txt, .jsonl, .csv or parquet."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.manifest import Parent, measure
from mlcd.errors import InvalidInput, NotFound
from mlcd.locations import Location, local_path, relative_location
from mlcd.text_checks import is_unicode
from mlcd.text_tables import csv_rows, join_columns, json_rows, open_text
from mlcd.types import SampleKey

# a tokenizer reads this many within a second; far more than the context of any model
MAX_CHARS: Final = 2**20
_COLUMNS: Final = ("id", "text")


@dataclass(frozen=True)
class TextFile:
    """The texts of a file, in its order.

    keys: ids of the texts, or the numbers of their lines or rows, from 1. texts: strings, or
    unusable values of other types. sha256: digest of the file.
    """

    path: Path
    keys: list[SampleKey]
    texts: list[object]
    sha256: str

    def parent_of(self, out: Path) -> Parent:
        location = relative_location(self.path, out)
        return Parent("texts", location, self.sha256)


def read_texts(location: Location) -> TextFile:
    """Reads a file of texts: one per line of .txt; else a column `text` and, optionally, `id`.

    Raises NotFound for a missing file; InvalidInput for another kind of file, a damaged file, a
    file without texts, or an id that occurs twice.
    """
    path = local_path(location)
    if not path.exists():
        raise NotFound(f"the file {path} does not exist")
    if path.suffix not in _READERS or not path.is_file():
        raise InvalidInput(f"texts must be in a file of {', '.join(_READERS)}, got {path}")
    try:
        rows = list(_READERS[path.suffix](path))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InvalidInput(
            f"{path} cannot be read as {path.suffix}: {error}", remedy="restore the file"
        ) from error
    if not rows:
        raise InvalidInput(f"{path} must contain at least one text")
    keys = [_to_key(path, number, key) for number, key, _ in rows]
    (key, num), *_ = Counter(keys).most_common(1)
    if num > 1:
        raise InvalidInput(
            f"ids must be unique, got {num} texts of the id {key!r} in {path}",
            remedy="give each text a different id",
        )
    return TextFile(path, keys, [text for _, _, text in rows], measure(path).sha256)


def _to_key(path: Path, number: int, key: object) -> SampleKey:
    """Returns a text's id, or its number if it has none. Raises InvalidInput for an unusable id."""
    if key is None:
        return str(number)
    is_name = isinstance(key, str | int) and not isinstance(key, bool)
    if not is_name or not (name := str(key)) or not is_unicode(name):
        raise InvalidInput(
            f"{path}: the id of text {number} must be a string with at least one character, or an"
            " integer",
            remedy="fix the id, or leave it out",
        )
    return name


_Row: TypeAlias = tuple[int, object, object]  # number of the line or row, id, text


def _read_lines(path: Path) -> Iterator[str]:
    """Yields the lines; a line with invalid UTF-8 is unusable, the other lines are not affected."""
    with (
        path.open("rb") as file,
        open_text(file, str(path), errors="surrogateescape", newline="\n") as lines,
    ):
        for line in lines:
            yield line.removesuffix("\n").removesuffix("\r")


def _read_txt(path: Path) -> Iterator[_Row]:
    for number, line in enumerate(_read_lines(path), 1):
        yield number, None, line


def _read_jsonl(path: Path) -> Iterator[_Row]:
    for number, row in json_rows(str(path), _read_lines(path)):
        if isinstance(row, dict):
            yield number, row.get("id"), row.get("text")
        else:
            yield number, None, row


def _read_csv(path: Path) -> Iterator[_Row]:
    with path.open("rb") as file, open_text(file, str(path)) as lines:
        rows = csv_rows(str(path), lines)
        _, header = next(rows, (0, []))
        _check_columns(path, header)
        indices = [header.index(name) if name in header else None for name in _COLUMNS]
        for number, (_, row) in enumerate(rows, 1):
            key, text = (None if index is None else row[index] for index in indices)
            yield number, key or None, text  # an empty cell means no id


def _read_parquet(path: Path) -> Iterator[_Row]:
    names = pq.read_schema(path).names
    _check_columns(path, names)
    table = pq.read_table(path, columns=[name for name in _COLUMNS if name in names])
    texts = table["text"].to_pylist()
    ids = table["id"].to_pylist() if "id" in names else [None] * len(texts)
    return zip(range(1, len(texts) + 1), ids, texts, strict=True)


def _check_columns(path: Path, names: Sequence[str]) -> None:
    if "text" not in names:
        raise InvalidInput(
            f"{path} must have a column `text`, got {join_columns(names)}",
            remedy="rename the column of texts to `text`",
        )
    for name in _COLUMNS:
        if names.count(name) > 1:
            raise InvalidInput(f"{path} has two columns `{name}`", remedy="rename one")


_READERS: Final[dict[str, Callable[[Path], Iterator[_Row]]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
