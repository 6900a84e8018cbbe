"""Reads columns of any type as texts: the keys and classes of tables.

pandas turns a column of integers with a missing value into floats, so 1 and 1.0 become the same
text, and NaN becomes null.
"""

import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from mlcd.errors import InvalidInput
from mlcd.images.names import printable

# the first of these columns that exists is used
CLASS_COLUMNS: Final = ("class_name", "label", "class", "cls", "fine_label")
_REMEDY: Final = "give one text or number per row, or rename the column"


class TextColumn:
    """A column of a file, read as one text per row.

    Raises only InvalidInput naming file and column, because the file is not damaged.
    """

    def __init__(self, schema: pa.Schema, name: str, path: str) -> None:
        """Raises InvalidInput for types that cannot be read as text."""
        self.name, self._path = name, path
        check_single(schema, name, path)
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            raise self._refusal(f"must hold texts or numbers, got {kind}")
        self._names = class_names(schema, name)

    def read(self, values: Any) -> pa.Array:
        """Returns the texts of the rows as large_string, null for missing values."""
        try:
            distinct = pc.dictionary_encode(_simplify(values))
            if isinstance(distinct, pa.ChunkedArray):
                distinct = distinct.combine_chunks()
            convert = _to_text if self._names is None else _make_name_lookup(self._names)
            texts = [convert(value) for value in distinct.dictionary.to_pylist()]
            return pa.array(texts, pa.large_string()).take(distinct.indices)
        except UnicodeDecodeError as error:
            raise self._refusal("must hold UTF-8, got other bytes") from error
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise self._refusal(f"cannot be read as text, got {values.type}") from error

    def _refusal(self, problem: str) -> InvalidInput:
        return InvalidInput(
            f"the column {self.name} of {printable(self._path)} {problem}", remedy=_REMEDY
        )


def check_single(schema: pa.Schema, name: str, path: str) -> None:
    """Raises InvalidInput if a file has several columns of this name."""
    if (num := len(schema.get_all_field_indices(name))) > 1:
        raise InvalidInput(
            f"{printable(path)} has {num} columns named {name}", remedy="keep one of them"
        )


def class_names(schema: pa.Schema, column: str) -> list[str] | None:
    """Returns the class names of a column of class numbers, from Hugging Face's metadata; None
    without them.
    """
    try:
        facts = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        return list(map(str, facts["names"])) if facts["_type"] == "ClassLabel" else None
    except (KeyError, ValueError, TypeError):
        return None


def _simplify(values: Any) -> Any:
    """Casts values to a type that pyarrow can dictionary-encode and convert to Python."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    is_bytes = is_bytes or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind)
    if is_bytes or pa.types.is_temporal(kind) or pa.types.is_string_view(kind):
        return values.cast(pa.large_string())
    # through a string, for the shortest decimal digits that identify the number in its type
    if pa.types.is_floating(kind) and kind != pa.float64():
        return values.cast(pa.large_string()).cast(pa.float64())
    return values


def _to_text(value: Any) -> str | None:
    """Returns the text of a value; None for missing values, such as NaN and empty texts."""
    number = _as_number(value)
    if number is None:
        return None if value is None else str(value) or None
    if not math.isfinite(number):
        return None
    if number == int(number):
        return str(int(number))
    return f"{number.normalize():f}" if isinstance(number, Decimal) else str(number)


def _make_name_lookup(names: Sequence[str]) -> Callable[[Any], str | None]:
    """Returns a function from a value, a class name or its number, to the class name.

    It returns None for -1, which marks images without a class, and for numbers without a name.
    """
    distinct_names = set(names)

    def find_name(value: Any) -> str | None:
        if value in distinct_names:
            return str(value)
        number = _parse_number(value) if isinstance(value, str) else _as_number(value)
        if number is None:
            return value or None if isinstance(value, str) else None
        if not math.isfinite(number) or number != int(number):
            return None
        return names[int(number)] if 0 <= number < len(names) else None

    return find_name


def _as_number(value: Any) -> float | Decimal | int | None:
    """Returns the value if it is a number and not a bool, otherwise None."""
    return value if isinstance(value, int | float | Decimal) and type(value) is not bool else None


def _parse_number(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None
