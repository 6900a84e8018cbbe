"""The filters of a search in SQL, with the meaning that `mlcd.collections.filters` gives them.

Equality is containment in JSON, which an index serves; bounds are a path in strict mode, in which
lists within lists stay what they are. Text compares by code point in both. No condition is ever
null, so that `not` means what it says.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import sql

from mlcd.collections.filters import Both, Condition, Filter, Not, OneOf
from mlcd.errors import InvalidInput

_TRUE, _FALSE = sql.SQL("true"), sql.SQL("false")
_AND, _OR = sql.SQL(" AND "), sql.SQL(" OR ")
_VALUE: Final = sql.SQL("facets @> %s::jsonb")
_PATH: Final = sql.SQL("coalesce(jsonb_path_exists(facets, %s::jsonpath, %s::jsonb, true), false)")
_SIGNS: Final = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@dataclass
class Where:
    """The condition on a row of a table of items. parameters: those of the
    condition, in order.
    """

    condition: sql.Composable
    parameters: list[Any] = field(default_factory=list)


def where(condition: Filter | None) -> Where:
    """Returns the filter as a condition."""
    match condition:
        case None:
            return Where(_TRUE)
        case OneOf(ids):
            return Where(
                sql.SQL("id = ANY(%s)"), [[item_id for item_id in ids if is_kept(item_id)]]
            )
        case Not(inner):
            inner_where = where(inner)
            return Where(sql.SQL("NOT {}").format(inner_where.condition), inner_where.parameters)
        case Both(parts, every):
            return _join(_AND if every else _OR, [where(part) for part in parts])
        case Condition():
            return _within(condition) if condition.values is None else _one_of(condition)
    raise TypeError(condition)


def is_kept(text: str) -> bool:
    """Tells whether Postgres can hold a text: it knows neither U+0000 nor half a pair."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _one_of(condition: Condition) -> Where:
    assert condition.values is not None
    values = [
        value
        for _, value in condition.values
        if (not isinstance(value, str) or is_kept(value)) and condition.fits(value)
    ]
    # a bare value, or one of a list
    contained = [{condition.field: entry} for value in values for entry in (value, [value])]
    return _join(_OR, [Where(_VALUE, [json.dumps(entry)]) for entry in contained])


def _within(condition: Condition) -> Where:
    if not all(is_kept(bound) for _, bound in condition.bounds if isinstance(bound, str)):
        raise InvalidInput(
            f"the filter's bound of {condition.field!r} has a character that Postgres cannot hold",
            remedy="leave out U+0000 and halves of surrogate pairs",
        )
    terms = " && ".join(
        f"@ {_SIGNS[name]} $b{number}" for number, (name, _) in enumerate(condition.bounds)
    )
    bounds = json.dumps({f"b{number}": bound for number, (_, bound) in enumerate(condition.bounds)})
    name = json.dumps(condition.field)
    paths = [f"strict $.{name}{entries} ? ({terms})" for entries in ("", "[*]")]
    return _join(_OR, [Where(_PATH, [path, bounds]) for path in paths])


def _join(word: sql.SQL, parts: list[Where]) -> Where:
    if not parts:
        return Where(_FALSE)
    joined = word.join([part.condition for part in parts])
    return Where(
        sql.SQL("({})").format(joined),
        [parameter for part in parts for parameter in part.parameters],
    )
