"""Reads text files of users: lists, CSV tables and JSON lines, all in UTF-8.

A byte order mark is dropped. Rows with too few or too many fields are errors.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Final

from mlcd.errors import InvalidInput

_BOM: Final = "\ufeff"
_OTHER_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")  # UTF-32's little-endian mark starts with UTF-16's
_MAX_FIELD_CHARS: Final = 1 << 24  # the default limit of the module csv is 2**17
_CSV_REMEDY: Final = 'put a text with commas or quotes in quotes, and write "" for a quote in it'


def decode_text(data: bytes, item: str) -> str:
    """Returns the text without a byte order mark. Raises InvalidInput if it is not UTF-8."""
    _refuse_utf_16(data[:4], item)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf_8_error(item) from error


def split_lines(text: str) -> list[str]:
    r"""Returns the lines of a text. Only \n and \r\n end a line: file names may contain any other
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
    """Returns an open binary file as text, without converting line ends by default.

    Raises InvalidInput for UTF-16.
    """
    _refuse_utf_16(file.read(4), item)
    file.seek(0)
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors=errors, newline=newline)


def csv_rows(item: str, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of its first line, fields) of each row of a CSV table, the header first.

    Yields nothing for an empty file. Empty lines are skipped.

    Raises InvalidInput naming the first row that is damaged or whose number of fields differs from
    the header, or a column that occurs twice in the header.
    """
    csv.field_size_limit(_MAX_FIELD_CHARS)
    reader = csv.reader(lines, strict=True)
    header: list[str] = []
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader, None)
        except UnicodeDecodeError as error:
            raise _not_utf_8_error(f"{item}, near line {start},") from error
        except csv.Error as error:
            raise InvalidInput(
                f"{item}, line {start}: {_describe_csv_error(error)}", remedy=_CSV_REMEDY
            ) from error
        if row is None:
            return
        if not "".join(row).strip() and len(row) <= 1:
            continue
        if not header:
            header = row = _check_header(item, row)
        elif len(row) != len(header):
            raise InvalidInput(
                f"{item}, line {start} must have {len(header)} fields like the header "
                f"({join_columns(header)}), got {len(row)}",
                remedy=_CSV_REMEDY,
            )
        yield start, row


def json_rows(item: str, lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Yields (line number, value) of each line of JSON; empty lines are skipped.

    Raises InvalidInput naming the first line that is not JSON.
    """
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, json.loads(line)
    except UnicodeDecodeError as error:
        raise _not_utf_8_error(f"{item}, near line {number + 1},") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{item}, line {number} is not JSON", remedy="give one object in each line"
        ) from error


def join_columns(names: Sequence[str]) -> str:
    """Returns the names of the first 20 columns for a message."""
    return ", ".join(name[:40] for name in names[:20]) or "none"


def _check_header(item: str, row: Sequence[str]) -> list[str]:
    names = [name.strip() for name in row]
    repeated = next((name for name in names if name and names.count(name) > 1), None)
    if repeated is not None:
        raise InvalidInput(f"{item} has two columns {repeated!r}", remedy="rename one")
    return names


def _describe_csv_error(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return "a quote opens in this row and is never closed"
    if "expected after" in str(error):
        return "text follows the closing quote of a field that starts in this row"
    return f"this row is not CSV ({error})"


def _refuse_utf_16(start: bytes, item: str) -> None:
    # UTF-16 without a byte order mark has a zero among its first bytes
    if start.startswith(_OTHER_BOMS) or b"\0" in start:
        raise InvalidInput(
            f"{item} must be in UTF-8, got UTF-16 or UTF-32", remedy="save it in UTF-8"
        )


def _not_utf_8_error(item: str) -> InvalidInput:
    return InvalidInput(f"{item} is not text in UTF-8", remedy="save it in UTF-8")
