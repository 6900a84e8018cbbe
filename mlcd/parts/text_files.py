"""A file of texts, each with the key that names it for ever: .txt, .jsonl, .csv or parquet."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from mlcd.artifacts.manifest import Parent, measure
from mlcd.errors import InvalidInput, NotFound
from mlcd.locations import Location, local_path, seen_from
from mlcd.text_checks import is_unicode
from mlcd.types import SampleKey

# what a tokenizer still reads within a second; far more than any model takes
MAX_CHARS: Final = 2**20
_COLUMNS: Final = ("id", "text")


@dataclass(frozen=True)
class TextFile:
    """The texts of a file, in their order.

    keys: their ids, or the numbers of lines or rows, from 1. texts: strings, or what stands in
    their place. sha256: of the file's bytes.
    """

    path: Path
    keys: list[SampleKey]
    texts: list[object]
    sha256: str

    def parent_of(self, out: Path) -> Parent:
        location = seen_from(self.path, out)
        return Parent("texts", location, self.sha256)


def read_texts(location: Location) -> TextFile:
    """Reads a file of texts: a text a line in .txt, else a column `text` and, optionally, `id`.

    Raises NotFound, and InvalidInput for another kind of file, a damaged one, one without texts,
    or one with an id twice.
    """
    path = local_path(location)
    if not path.exists():
        raise NotFound(f"there is no file {path}")
    if path.suffix not in _READERS or not path.is_file():
        raise InvalidInput(f"{path} is no file of texts", remedy=f"known: {', '.join(_READERS)}")
    try:
        rows = list(_READERS[path.suffix](path))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InvalidInput(
            f"{path} cannot be read as {path.suffix}: {error}", remedy="restore the file"
        ) from error
    if not rows:
        raise InvalidInput(f"{path} holds no text")
    keys = [_key(path, number, key) for number, (key, _) in enumerate(rows, 1)]
    (key, num), *_ = Counter(keys).most_common(1)
    if num > 1:
        raise InvalidInput(f"{path} has {num} texts of the id {key!r}", remedy="give each its own")
    return TextFile(path, keys, [text for _, text in rows], measure(path).sha256)


def _key(path: Path, number: int, key: object) -> SampleKey:
    """Returns a text's id, or its number where it has none; raises InvalidInput for an id that
    names nothing.
    """
    if key is None:
        return str(number)
    is_name = isinstance(key, str | int) and not isinstance(key, bool)
    if not is_name or not (name := str(key)) or not is_unicode(name):
        raise InvalidInput(
            f"{path}: the id of text {number} is neither a string of characters nor an integer",
            remedy="leave it out, or give each its own",
        )
    return name


def _lines(path: Path) -> Iterator[str]:
    """Yields lines; bytes that are no UTF-8 make theirs alone unusable."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n").removesuffix("\r")


def _txt(path: Path) -> Iterator[tuple[None, object]]:
    for line in _lines(path):
        yield None, line


def _jsonl(path: Path) -> Iterator[tuple[object, object]]:
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error
        yield (row.get("id"), row.get("text")) if isinstance(row, dict) else (None, row)


def _csv(path: Path) -> Iterator[tuple[object, object]]:
    types: dict[str, Any] = dict.fromkeys(_COLUMNS, pa.string())
    table = pyarrow.csv.read_csv(
        path,
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=False),
    )
    for key, text in _rows(path, table):
        yield key or None, text  # an empty cell is no id


def _parquet(path: Path) -> Iterator[tuple[object, object]]:
    schema = pq.read_schema(path)
    return _rows(path, pq.read_table(path, columns=[n for n in _COLUMNS if n in schema.names]))


def _rows(path: Path, table: pa.Table) -> Iterator[tuple[object, object]]:
    if "text" not in table.column_names:
        raise InvalidInput(f"{path} has no column `text`", remedy="name the column of texts so")
    for name in _COLUMNS:
        if table.column_names.count(name) > 1:
            raise InvalidInput(f"{path} has two columns `{name}`", remedy="rename one")
    texts = table["text"].to_pylist()
    ids = table["id"].to_pylist() if "id" in table.column_names else [None] * len(texts)
    return zip(ids, texts, strict=True)


_READERS: Final[dict[str, Callable[[Path], Iterator[tuple[object, object]]]]] = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}
