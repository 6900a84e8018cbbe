"""The metadata of all positions by field, dictionary-encoded for filters.

A column has a code per position, and a value per code. A filter evaluates a condition once per
distinct value and looks up the result by code. Positions are only appended, so a reader of the
first N positions is not affected by a concurrent writer, and neither needs a lock.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Scalar = str | float | bool
_ABSENT: Final = -1
_SMALLEST: Final = 1024


class Column:
    """The codes of one field: int32, -1 for a position without a comparable value."""

    def __init__(
        self, codes: NDArray[np.int32] | None = None, values: Sequence[tuple[Scalar, ...]] = ()
    ) -> None:
        self._codes = np.full(_SMALLEST, _ABSENT, dtype=np.int32) if codes is None else codes
        self._values: list[tuple[Scalar, ...]] = []
        self._code_of: dict[tuple[tuple[type, Scalar], ...], int] = {}
        self._numbers = np.full(_SMALLEST, np.nan)
        self._lists: list[int] = []
        for value in values:
            self._enter(value, _key(value))

    def set(self, position: int, value: tuple[Scalar, ...]) -> None:
        key = _key(value)
        code = self._code_of.get(key)
        if code is None:
            code = self._enter(value, key)
        if position >= len(self._codes):
            grown = np.full(max(2 * len(self._codes), position + 1), _ABSENT, dtype=np.int32)
            grown[: len(self._codes)] = self._codes
            self._codes = grown
        self._codes[position] = code

    def codes(self, num: int) -> NDArray[np.int32]:
        """Returns the codes of the first `num` positions, [num], padded with -1."""
        codes = self._codes[:num]
        if len(codes) == num:
            return codes
        return np.concatenate([codes, np.full(num - len(codes), _ABSENT, dtype=np.int32)])

    def _enter(self, value: tuple[Scalar, ...], key: tuple[tuple[type, Scalar], ...]) -> int:
        code = len(self._values)
        if code == len(self._numbers):
            self._numbers = np.concatenate([self._numbers, np.full(code, np.nan)])
        if len(value) != 1:
            self._lists.append(code)
        elif type(value[0]) is float:
            self._numbers[code] = value[0]
        self._values.append(value)  # last, so that readers only see complete codes
        self._code_of[key] = code
        return code

    @property
    def values(self) -> list[tuple[Scalar, ...]]:
        """Returns the value of each code as a tuple: one scalar, or the scalars of a list."""
        return self._values

    def numbers(self, num: int) -> NDArray[np.float64]:
        """Returns the numbers of the first `num` codes, NaN for values that are not a number."""
        return self._numbers[:num]

    def lists(self, num: int) -> list[int]:
        """Returns the codes below `num` whose value is a list."""
        return [code for code in self._lists.copy() if code < num]

    def code_of(self, value: Scalar) -> int | None:
        """Returns the code of a scalar; None if no item has it as its value."""
        return self._code_of.get(((type(value), value),))

    def take(self, positions: NDArray[np.int64], num: int) -> "Column":
        """Returns a column of these positions, all below `num`, in this order."""
        codes = self.codes(num)[positions]
        used = np.unique(codes[codes >= 0])
        # Code -1 indexes the last entry, which is -1 too.
        renumbered = np.full(int(used[-1]) + 2 if len(used) else 1, _ABSENT, dtype=np.int32)
        renumbered[used] = np.arange(len(used), dtype=np.int32)
        return Column(renumbered[codes], [self._values[code] for code in used])


class Columns:
    """The columns of all fields, including fields that no item has any more."""

    def __init__(self, columns: Mapping[str, Column] | None = None) -> None:
        self._columns: dict[str, Column] = dict(columns or {})

    def append(self, position: int, metadata: Mapping[str, Any]) -> None:
        for name, value in metadata.items():
            values = comparable(value)
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = Column()
            if values:
                column.set(position, values)

    def find(self, name: str) -> Column | None:
        return self._columns.get(name)

    def names(self) -> list[str]:
        return sorted(self._columns.copy())

    def take(self, positions: NDArray[np.int64], num: int) -> "Columns":
        """Returns the columns of these positions, without fields that none of the positions has."""
        columns = {
            name: column.take(positions, num) for name, column in self._columns.copy().items()
        }
        return Columns({name: column for name, column in columns.items() if column.values})


def _key(value: tuple[Scalar, ...]) -> tuple[tuple[type, Scalar], ...]:
    """Returns a key that distinguishes True from 1."""
    return tuple((type(part), part) for part in value)


def comparable(value: object) -> tuple[Scalar, ...]:
    """Returns the scalars of a JSON value or of a list that filters can compare."""
    if isinstance(value, list):
        return tuple(_scalar(part) for part in value if isinstance(part, bool | str | int | float))
    return (_scalar(value),) if isinstance(value, bool | str | int | float) else ()


def _scalar(value: bool | str | float) -> Scalar:  # noqa: FBT001 - a JSON value
    return value if isinstance(value, bool | str) else float(value)
