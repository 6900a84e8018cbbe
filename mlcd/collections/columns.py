"""The metadata of all positions by field, on which filters are evaluated.

A column holds for each position the code of its value, and for each code the value. A condition is
decided once for each distinct value and then looked up. Positions are only ever appended: a reader
that looks at the first N of them sees the same whatever a writer does, so neither waits for the
other.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Scalar = str | float | bool
_ABSENT: Final = -1
_SMALLEST: Final = 1024


class Column:
    """The codes of one field: int32, -1 where a position lacks a comparable value."""

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
        """Returns the codes of the first positions, [num]; positions after the last value have
        none.
        """
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
        self._values.append(value)  # last, so that a code that a reader meets is complete
        self._code_of[key] = code
        return code

    @property
    def values(self) -> list[tuple[Scalar, ...]]:
        """Returns the values of each code: one value, or those of a list."""
        return self._values

    def numbers(self, num: int) -> NDArray[np.float64]:
        """Returns the numbers of the first codes, NaN where a value is a list or no number."""
        return self._numbers[:num]

    def lists(self, num: int) -> list[int]:
        """Returns those of the first codes that stand for a list."""
        return [code for code in self._lists.copy() if code < num]

    def code_of(self, value: Scalar) -> int | None:
        """Returns the code of this one value; None where no item has it."""
        return self._code_of.get(((type(value), value),))

    def take(self, positions: NDArray[np.int64], num: int) -> "Column":
        """Returns the column of these positions, out of the first `num`, in this order."""
        codes = self.codes(num)[positions]
        used = np.unique(codes[codes >= 0])
        # The last entry is the one that -1 points at.
        renumbered = np.full(int(used[-1]) + 2 if len(used) else 1, _ABSENT, dtype=np.int32)
        renumbered[used] = np.arange(len(used), dtype=np.int32)
        return Column(renumbered[codes], [self._values[code] for code in used])


class Columns:
    """The columns of all fields that an item ever had."""

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
        """Returns the columns of these positions, without fields that none of them has."""
        columns = {
            name: column.take(positions, num) for name, column in self._columns.copy().items()
        }
        return Columns({name: column for name, column in columns.items() if column.values})


def _key(value: tuple[Scalar, ...]) -> tuple[tuple[type, Scalar], ...]:
    """Returns a key in which True and 1 differ."""
    return tuple((type(part), part) for part in value)


def comparable(value: object) -> tuple[Scalar, ...]:
    if isinstance(value, list):
        return tuple(_scalar(part) for part in value if isinstance(part, bool | str | int | float))
    return (_scalar(value),) if isinstance(value, bool | str | int | float) else ()


def _scalar(value: bool | str | float) -> Scalar:  # noqa: FBT001 - a JSON value
    return value if isinstance(value, bool | str) else float(value)
