"""Search filters: boolean combinations of conditions on metadata.

    {"field": "color", "eq": "red"}                  {"and": [FILTER, …]}
    {"field": "color", "in": ["red", "blue"]}        {"or": [FILTER, …]}
    {"field": "price", "ge": 3, "lt": 10}            {"not": FILTER}
    {"id": {"in": ["sea/1.png", …]}}

eq and in take strings, numbers and booleans; they match any entry of a list in the metadata. lt,
le, gt and ge compare numbers with numbers and strings with strings (by code point, so ISO 8601
dates compare as dates). An item without the field matches no condition on it.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from mlcd.collections.columns import Column, Columns, Scalar
from mlcd.collections.item import MAX_FIELD_BYTES, is_exact
from mlcd.errors import InvalidInput

MAX_DEPTH: Final = 8
MAX_CONDITIONS: Final = 128
# of one `in`
MAX_VALUES: Final = 1024
MAX_IDS: Final = 10_000
RANGES: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_OPERATORS: Final = ("eq", "in", *RANGES)
_EXAMPLE: Final = '{"field": "color", "eq": "red"}'


class Known(Protocol):
    """The items to which a filter is applied.

    num_positions: number of items. columns: metadata of the items. position_of: position of each
    id; positions from num_positions on belong to later states.
    """

    @property
    def num_positions(self) -> int: ...

    @property
    def columns(self) -> Columns: ...

    @property
    def position_of(self) -> Mapping[str, int]: ...


class Filter(Protocol):
    def matches(self, items: Known) -> NDArray[np.bool_]:
        """Returns a mask of the positions that match the filter, bool [num_positions]."""
        ...


@dataclass(frozen=True)
class Condition:
    """A condition: `field` has one of `values` (None: any) and lies within all `bounds`."""

    field: str
    values: frozenset[tuple[type, Scalar]] | None
    bounds: tuple[tuple[str, Scalar], ...]

    def matches(self, items: Known) -> NDArray[np.bool_]:
        column = items.columns.find(self.field)
        if column is None:
            return np.zeros(items.num_positions, dtype=np.bool_)
        codes = column.codes(items.num_positions)
        matches: NDArray[np.bool_] = self._match_codes(column)[codes]
        return matches

    def fits(self, value: Scalar) -> bool:
        """Returns whether a value is within all bounds."""
        return all(
            type(value) is type(bound) and RANGES[name](value, bound) for name, bound in self.bounds
        )

    def _match_codes(self, column: Column) -> NDArray[np.bool_]:
        """Returns whether each code's value matches; the last entry, of code -1, is False.

        Vectorized for `values` and for numeric bounds: a million distinct values need no Python
        loop.
        """
        num = len(column.values)
        matches = np.zeros(num + 1, dtype=np.bool_)
        if self.values is not None:
            codes = (column.code_of(value) for _, value in self.values)
            codes_to_check = [code for code in codes if code is not None and code < num]
        elif all(type(bound) is float for _, bound in self.bounds):
            numbers = column.numbers(num)
            is_within = ~np.isnan(numbers)
            for name, bound in self.bounds:
                is_within &= RANGES[name](numbers, bound)
            matches[:num] = is_within
            codes_to_check = []
        else:
            matches[:num] = [self._matches_any(value) for value in column.values[:num]]
            return matches
        for code in (*codes_to_check, *column.lists(num)):
            matches[code] = self._matches_any(column.values[code])
        return matches

    def _matches_any(self, value: tuple[Scalar, ...]) -> bool:
        return any(self._matches_scalar(part) for part in value)

    def _matches_scalar(self, part: Scalar) -> bool:
        if self.values is not None and (type(part), part) not in self.values:
            return False
        return all(
            type(part) is type(bound) and RANGES[name](part, bound) for name, bound in self.bounds
        )


@dataclass(frozen=True)
class OneOf:
    """A condition: the item has one of these ids. Ids of no item are ignored."""

    ids: tuple[str, ...]

    def matches(self, items: Known) -> NDArray[np.bool_]:
        num = items.num_positions
        mask = np.zeros(num, dtype=np.bool_)
        positions = (items.position_of.get(item_id, num) for item_id in self.ids)
        mask[[position for position in positions if position < num]] = True
        return mask


@dataclass(frozen=True)
class Not:
    inner: Filter

    def matches(self, items: Known) -> NDArray[np.bool_]:
        return ~self.inner.matches(items)


@dataclass(frozen=True)
class Combination:
    """A combination of filters. all: every part must match; otherwise at least one."""

    parts: tuple[Filter, ...]
    all: bool

    def matches(self, items: Known) -> NDArray[np.bool_]:
        combine = np.logical_and if self.all else np.logical_or
        result = self.parts[0].matches(items)
        for part in self.parts[1:]:
            result = combine(result, part.matches(items))
        return result


def parse_filter(content: object) -> Filter:
    """Parses a filter from JSON values.

    Raises InvalidInput naming what is invalid; it quotes only names, never values of the filter.
    """
    return _Parser().parse(content, 1)


class _Parser:
    """Parses one filter, and limits its depth and number of conditions."""

    def __init__(self) -> None:
        self._num_conditions = 0

    def parse(self, content: object, depth: int) -> Filter:
        if depth > MAX_DEPTH:
            raise InvalidInput(
                "the filter is nested too deep", remedy=f"at most {MAX_DEPTH} levels are possible"
            )
        if not isinstance(content, Mapping) or not content:
            raise InvalidInput("a filter is a JSON object", remedy=f"for example {_EXAMPLE}")
        for name in ("and", "or", "not", "id"):
            if name in content:
                if len(content) > 1:
                    raise InvalidInput(
                        f"{name!r} of the filter must be the only key of its object",
                        remedy="combine them with 'and'",
                    )
                if name == "id":
                    self._count()
                    return OneOf(_ids(content[name]))
                return self._combination(name, content[name], depth)
        return self._condition(content)

    def _combination(self, name: str, inner: object, depth: int) -> Filter:
        if name == "not":
            return Not(self.parse(inner, depth + 1))
        if not _is_list(inner) or not inner:
            raise InvalidInput(
                f"{name!r} of the filter must be a list of filters",
                remedy=f"for example [{_EXAMPLE}]",
            )
        return Combination(tuple(self.parse(part, depth + 1) for part in inner), name == "and")

    def _count(self) -> None:
        self._num_conditions += 1
        if self._num_conditions > MAX_CONDITIONS:
            raise InvalidInput(
                "the filter has too many conditions",
                remedy=f"at most {MAX_CONDITIONS} are possible",
            )

    def _condition(self, content: Mapping[str, Any]) -> Filter:
        self._count()
        name = content.get("field")
        if (
            not isinstance(name, str)
            or not 0 < len(name.encode(errors="replace")) <= MAX_FIELD_BYTES
        ):
            raise InvalidInput(
                "a condition of the filter must name a field", remedy=f"for example {_EXAMPLE}"
            )
        operators = [key for key in content if key != "field"]
        unknown = [key for key in operators if key not in _OPERATORS]
        if unknown or not operators:
            operator = repr(str(unknown[0])[:MAX_FIELD_BYTES]) if unknown else "none"
            raise InvalidInput(
                f"the filter on {name!r} must have one of the operators {', '.join(_OPERATORS)},"
                f" got {operator}",
                remedy=f"for example {_EXAMPLE}",
            )
        values = None
        for key in ("eq", "in"):
            if key in content:
                allowed = _values(name, [content[key]] if key == "eq" else content[key])
                values = allowed if values is None else values & allowed
        bounds = tuple((key, _bound(name, content[key])) for key in RANGES if key in content)
        return Condition(name, values, bounds)


def _values(name: str, content: object) -> frozenset[tuple[type, Scalar]]:
    if not _is_list(content) or len(content) > MAX_VALUES:
        raise InvalidInput(
            f"'in' on {name!r} must be a list of values",
            remedy=f"at most {MAX_VALUES} are possible",
        )
    if not all(isinstance(value, bool | str | int | float) for value in content):
        raise InvalidInput(
            f"the filter's value of {name!r} cannot be compared",
            remedy="strings, numbers and booleans",
        )
    return frozenset((type(value), value) for value in (_scalar(name, value) for value in content))


def _ids(content: object) -> tuple[str, ...]:
    ids = content.get("in") if isinstance(content, Mapping) and len(content) == 1 else None
    if not _is_list(ids) or not all(isinstance(item_id, str) for item_id in ids):
        raise InvalidInput(
            "'id' of the filter must be a list of ids",
            remedy='for example {"id": {"in": ["a.png"]}}',
        )
    if len(ids) > MAX_IDS:
        raise InvalidInput(
            f"the filter names {len(ids)} ids", remedy=f"at most {MAX_IDS} are possible"
        )
    return tuple(ids)


def _bound(name: str, content: object) -> Scalar:
    if isinstance(content, bool) or not isinstance(content, str | int | float):
        raise InvalidInput(
            f"the filter's bound of {name!r} cannot be ordered", remedy="give a string or a number"
        )
    return _scalar(name, content)


def _scalar(name: str, value: bool | str | float) -> Scalar:  # noqa: FBT001 - a JSON value
    if isinstance(value, bool | str):
        return value
    if not is_exact(value):
        raise InvalidInput(
            f"the filter's number of {name!r} must be finite and, where it is an integer, within"
            " ±2^53, as in metadata",
            remedy="larger integers are kept and compared as strings",
        )
    return float(value)


def _is_list(content: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(content, list | tuple)
