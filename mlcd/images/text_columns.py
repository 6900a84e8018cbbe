"""Texts from columns of any type: the keys and the classes of tables.

A column of whole numbers in which one value is missing becomes one of floats in pandas: 1 and 1.0
are the same text, and NaN is none.
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

# the first that is there counts
CLASS_COLUMNS: Final = ("class_name", "label", "class", "cls", "fine_label")
_REMEDY: Final = "give one text or number a row, or rename the column"


class TextColumn:
    """A column of a file that states a text for each row.

    Its errors are InvalidInput and name file and column: the file is not damaged.
    """

    def __init__(self, schema: pa.Schema, name: str, path: str) -> None:
        """Raises InvalidInput for types other than text."""
        self.name, self._path = name, path
        check_single(schema, name, path)
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            raise self._refusal(f"holds {kind}")
        self._names = class_names(schema, name)

    def read(self, values: Any) -> pa.Array:
        """Returns the texts of these rows as large_string, null where there is none."""
        try:
            distinct = pc.dictionary_encode(_plain(values))
            if isinstance(distinct, pa.ChunkedArray):
                distinct = distinct.combine_chunks()
            convert = _text if self._names is None else _name_of(self._names)
            texts = [convert(value) for value in distinct.dictionary.to_pylist()]
            return pa.array(texts, pa.large_string()).take(distinct.indices)
        except UnicodeDecodeError as error:
            raise self._refusal("holds texts that are not UTF-8") from error
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise self._refusal(f"holds {values.type}, which cannot be read as text") from error

    def _refusal(self, problem: str) -> InvalidInput:
        return InvalidInput(
            f"the column {self.name} of {printable(self._path)} {problem}", remedy=_REMEDY
        )


def check_single(schema: pa.Schema, name: str, path: str) -> None:
    """Raises InvalidInput where a file has several columns of this name."""
    if (num := len(schema.get_all_field_indices(name))) > 1:
        raise InvalidInput(
            f"{printable(path)} has {num} columns named {name}", remedy="keep one of them"
        )


def class_names(schema: pa.Schema, column: str) -> list[str] | None:
    """Returns the names of the numbers in a column of classes, where the file states them as
    Hugging Face does.
    """
    try:
        facts = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        return list(map(str, facts["names"])) if facts["_type"] == "ClassLabel" else None
    except (KeyError, ValueError, TypeError):
        return None


def _plain(values: Any) -> Any:
    """Returns the values in a type whose distinct values are found and become Python's."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    is_bytes = is_bytes or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind)
    if is_bytes or pa.types.is_temporal(kind) or pa.types.is_string_view(kind):
        return values.cast(pa.large_string())
    # the shortest digits that tell the number from others of its type
    if pa.types.is_floating(kind) and kind != pa.float64():
        return values.cast(pa.large_string()).cast(pa.float64())
    return values


def _text(value: Any) -> str | None:
    """Returns the text of a value; None for what pandas and others write where one is missing."""
    number = _number(value)
    if number is None:
        return None if value is None else str(value) or None
    if not math.isfinite(number):
        return None
    if number == int(number):
        return str(int(number))
    return f"{number.normalize():f}" if isinstance(number, Decimal) else str(number)


def _name_of(names: Sequence[str]) -> Callable[[Any], str | None]:
    """Returns a function from a value to its name: the name itself, or its number.

    -1, which marks images without a class, and numbers without a name give None.
    """
    distinct_names = set(names)

    def name_of(value: Any) -> str | None:
        if value in distinct_names:
            return str(value)
        number = _number_in(value) if isinstance(value, str) else _number(value)
        if number is None:
            return value or None if isinstance(value, str) else None
        if not math.isfinite(number) or number != int(number):
            return None
        return names[int(number)] if 0 <= number < len(names) else None

    return name_of


def _number(value: Any) -> float | Decimal | int | None:
    """Returns the value where it is a number and not a truth value."""
    return value if isinstance(value, int | float | Decimal) and type(value) is not bool else None


def _number_in(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None
