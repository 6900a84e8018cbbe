"""Reads text files of users: lists, tables in CSV and JSON lines, all in UTF-8.

A byte order mark is dropped. Rows that do not fit the table are refused, never cut.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Final

from mlcd.errors import InvalidInput

_BOM: Final = "\ufeff"
_OTHER_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")  # UTF-32's little-endian mark begins as UTF-16's
_MAX_FIELD: Final = 1 << 24  # characters; the module's own limit is 2**17
_CSV: Final = 'put a text with commas or quotes between quotes, and write "" for a quote in it'


def decode_text(data: bytes, item: str) -> str:
    """Returns the text without a byte order mark. Raises InvalidInput where it is not in UTF-8."""
    _refuse_utf_16(data[:4], item)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf_8(item) from error


def split_lines(text: str) -> list[str]:
    r"""Returns the lines of a text, which end at \n or \r\n alone: a file's name may hold any other
    separator.
    """
    lines = [line.removesuffix("\r") for line in text.removeprefix(_BOM).split("\n")]
    return lines if lines[-1] else lines[:-1]


def read_list(data: bytes, item: str) -> list[str]:
    """Returns the lines of a list of file names, which need not be valid UTF-8 (see
    `mlcd.images.names`).

    Raises InvalidInput for UTF-16.
    """
    _refuse_utf_16(data[:4], item)
    return split_lines(data.decode("utf-8", "surrogateescape"))


def open_text(
    file: IO[bytes], item: str, *, errors: str = "strict", newline: str = ""
) -> io.TextIOWrapper:
    """Returns an open binary file as text, with its line ends as they are.

    Raises InvalidInput for UTF-16.
    """
    _refuse_utf_16(file.read(4), item)
    file.seek(0)
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors=errors, newline=newline)


def csv_rows(item: str, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of the line where it begins, fields) of each row of a table in CSV, the header
    first; none for an empty file. Empty lines are skipped.

    Raises InvalidInput naming the first row that is damaged or has not as many fields as the
    header, and a column that the header has twice.
    """
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.reader(lines, strict=True)
    header: list[str] = []
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader, None)
        except UnicodeDecodeError as error:
            raise _not_utf_8(f"{item}, near line {start},") from error
        except csv.Error as error:
            raise InvalidInput(f"{item}, line {start}: {_fault(error)}", remedy=_CSV) from error
        if row is None:
            return
        if not "".join(row).strip() and len(row) <= 1:
            continue
        if not header:
            header = row = _check_header(item, row)
        elif len(row) != len(header):
            raise InvalidInput(
                f"{item}, line {start} has {len(row)} fields, and the header {len(header)} "
                f"({join_columns(header)})",
                remedy=_CSV,
            )
        yield start, row


def json_rows(item: str, lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Yields (number of its line, value) of each line of JSON; empty lines hold none.

    Raises InvalidInput naming the line that is damaged.
    """
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, json.loads(line)
    except UnicodeDecodeError as error:
        raise _not_utf_8(f"{item}, near line {number + 1},") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{item}, line {number} is not JSON", remedy="give one object in each line"
        ) from error


def join_columns(names: Sequence[str]) -> str:
    """Returns the names of columns for a message."""
    return ", ".join(name[:40] for name in names[:20]) or "none"


def _check_header(item: str, row: Sequence[str]) -> list[str]:
    names = [name.strip() for name in row]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"{item} has two columns {twice!r}", remedy="rename one")
    return names


def _fault(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return "a quote opens in this row and is never closed"
    if "expected after" in str(error):
        return "text follows the closing quote of a field that begins in this row"
    return f"this row is not CSV ({error})"


def _refuse_utf_16(start: bytes, item: str) -> None:
    # text in UTF-16 without a mark has a zero among its first bytes
    if start.startswith(_OTHER_BOMS) or b"\0" in start:
        raise InvalidInput(f"{item} is in UTF-16 or UTF-32", remedy="save it in UTF-8")


def _not_utf_8(item: str) -> InvalidInput:
    return InvalidInput(f"{item} is not text in UTF-8", remedy="save it in UTF-8")
