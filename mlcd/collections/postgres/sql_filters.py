"""Translates search filters to SQL with the semantics of `mlcd.collections.filters`.

Equality is JSON containment, for which there is an index. Bounds are a JSON path in strict mode,
which does not unwrap nested lists. Strings compare by code point in both. No condition is ever
null, so `not` is exact negation.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import sql

from mlcd.collections.filters import Combination, Condition, Filter, Not, OneOf
from mlcd.errors import InvalidInput

_TRUE, _FALSE = sql.SQL("true"), sql.SQL("false")
_AND, _OR = sql.SQL(" AND "), sql.SQL(" OR ")
_VALUE: Final = sql.SQL("facets @> %s::jsonb")
_PATH: Final = sql.SQL("coalesce(jsonb_path_exists(facets, %s::jsonpath, %s::jsonb, true), false)")
_SIGNS: Final = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@dataclass
class Where:
    """A condition of a WHERE clause on a table of items. parameters: its parameters, in order."""

    condition: sql.Composable
    parameters: list[Any] = field(default_factory=list)


def where(condition: Filter | None) -> Where:
    """Returns the filter as a condition in SQL; None matches every item."""
    match condition:
        case None:
            return Where(_TRUE)
        case OneOf(ids):
            return Where(
                sql.SQL("id = ANY(%s)"), [[item_id for item_id in ids if is_storable(item_id)]]
            )
        case Not(inner):
            inner_where = where(inner)
            return Where(sql.SQL("NOT {}").format(inner_where.condition), inner_where.parameters)
        case Combination(parts, every):
            return _join(_AND if every else _OR, [where(part) for part in parts])
        case Condition():
            return _within(condition) if condition.values is None else _one_of(condition)
    raise TypeError(condition)


def is_storable(text: str) -> bool:
    """Returns whether Postgres can store a text: without U+0000 and unpaired surrogates."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _one_of(condition: Condition) -> Where:
    assert condition.values is not None
    values = [
        value
        for _, value in condition.values
        if (not isinstance(value, str) or is_storable(value)) and condition.fits(value)
    ]
    # The field is the value, or a list that contains it.
    contained = [{condition.field: entry} for value in values for entry in (value, [value])]
    return _join(_OR, [Where(_VALUE, [json.dumps(entry)]) for entry in contained])


def _within(condition: Condition) -> Where:
    if not all(is_storable(bound) for _, bound in condition.bounds if isinstance(bound, str)):
        raise InvalidInput(
            f"the filter's bound of {condition.field!r} has a character that Postgres cannot store",
            remedy="leave out U+0000 and halves of surrogate pairs",
        )
    terms = " && ".join(
        f"@ {_SIGNS[name]} $b{index}" for index, (name, _) in enumerate(condition.bounds)
    )
    bounds = json.dumps({f"b{index}": bound for index, (_, bound) in enumerate(condition.bounds)})
    name = json.dumps(condition.field)
    paths = [f"strict $.{name}{suffix} ? ({terms})" for suffix in ("", "[*]")]
    return _join(_OR, [Where(_PATH, [path, bounds]) for path in paths])


def _join(word: sql.SQL, parts: list[Where]) -> Where:
    if not parts:
        return Where(_FALSE)
    joined = word.join([part.condition for part in parts])
    return Where(
        sql.SQL("({})").format(joined),
        [parameter for part in parts for parameter in part.parameters],
    )
