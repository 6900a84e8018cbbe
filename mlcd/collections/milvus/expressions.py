"""Translates search filters to Milvus expressions with the semantics of `mlcd.collections.filters`.

Milvus compares JSON values by its own rules, which differ between versions for missing fields,
lists, mixed types and large numbers. Expressions do not use these rules. Instead, each item has

    tokens   an array of digests: of each field, and of each value of a field with its type
    spans    a JSON object: the only number and the only string of each field, encoded as text that
             sorts like the values

and an expression only tests whether an array contains a text, or compares two ASCII texts. A bound
on a field with several numbers or several strings cannot be evaluated by Milvus:
`MilvusFilter.undecided_tokens` has the tokens of such fields. No part of an expression is ever
null, so `not` is exact negation.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mlcd.collections.columns import Scalar, comparable
from mlcd.collections.filters import Combination, Condition, Filter, Not, OneOf

TOKEN_CHARS: Final = 32
# tokens per item; metadata within their size limit have no more
MAX_TOKENS: Final = 4096
ALL_ITEMS, NO_ITEMS = "row >= 0", "row < 0"
_SIGNS: Final = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_OPPOSITE: Final = {"lt": ">=", "le": ">", "gt": "<=", "ge": "<"}
_ORDERED: Final = (float, str)
_SIGN_BIT: Final = 1 << 63
_ALL_BITS: Final = (1 << 64) - 1


@dataclass(frozen=True)
class MilvusFilter:
    """A filter as an expression. undecided_tokens: tokens of items for which the expression is
    undecided.
    """

    expression: str
    undecided_tokens: frozenset[str]


def translate_filter(condition: Filter | None, key_of: Any) -> MilvusFilter:
    """Returns the filter as an expression; None matches all items. key_of: function from an id to
    its key.
    """
    if condition is None:
        return MilvusFilter(ALL_ITEMS, frozenset())
    undecided_tokens: set[str] = set()
    expression = _Writer(key_of, undecided_tokens).write(condition, negated=False)
    return MilvusFilter(expression, frozenset(undecided_tokens))


def tokens_of(metadata: Mapping[str, Any]) -> list[str]:
    """Returns the tokens of an item with these metadata."""
    tokens: dict[str, None] = {}
    for name, value in metadata.items():
        tokens[_token("field", name)] = None
        values = comparable(value)
        for scalar in values:
            tokens[_value_token(name, scalar)] = None
        for kind in _ORDERED:
            num = len({scalar for scalar in values if type(scalar) is kind})
            if num:
                tokens[_token("one" if num == 1 else "several", name, kind.__name__)] = None
    return list(tokens)


def spans_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the sortable texts that bounds are compared with, by `_span`."""
    spans = {}
    for name, value in metadata.items():
        values = comparable(value)
        for kind in _ORDERED:
            distinct = {scalar for scalar in values if type(scalar) is kind}
            if len(distinct) == 1:
                spans[_span(name, kind)] = _sortable(distinct.pop())
    return spans


def field_token(name: str) -> str:
    return _token("field", name)


def quote_list(digests: Iterable[str]) -> str:
    """Returns a list literal of an expression."""
    return f"[{', '.join(json.dumps(digest) for digest in digests)}]"


@dataclass(frozen=True)
class _Writer:
    key_of: Any
    undecided_tokens: set[str]

    def write(self, condition: Filter, *, negated: bool) -> str:
        match condition:
            case OneOf(ids):
                return self._one_of_ids(ids, negated=negated)
            case Not(inner):
                return self.write(inner, negated=not negated)
            case Combination(parts, every):
                word = " and " if every is not negated else " or "
                written = [self.write(part, negated=negated) for part in parts]
                return f"({word.join(written)})"
            case Condition():
                if condition.values is None:
                    return self._within(condition, negated=negated)
                return _has_value(condition, negated=negated)
        raise TypeError(condition)

    def _one_of_ids(self, ids: tuple[str, ...], *, negated: bool) -> str:
        keys = sorted({self.key_of(item_id) for item_id in ids if _is_unicode(item_id)})
        if not keys:
            return ALL_ITEMS if negated else NO_ITEMS
        return f"key {'not in' if negated else 'in'} {quote_list(keys)}"

    def _within(self, condition: Condition, *, negated: bool) -> str:
        kinds = {type(bound) for _, bound in condition.bounds}
        if len(kinds) != 1:  # no value is both a number and a string
            return ALL_ITEMS if negated else NO_ITEMS
        name, (kind,) = condition.field, kinds
        self.undecided_tokens.add(_token("several", name, kind.__name__))
        has_one = _contains([_token("one", name, kind.__name__)], negated=negated)
        signs = _OPPOSITE if negated else _SIGNS
        compared = [
            f'spans["{_span(name, kind)}"] {signs[operator]} "{_sortable(bound)}"'
            for operator, bound in condition.bounds
        ]
        return f"({(' or ' if negated else ' and ').join([has_one, *compared])})"


def _has_value(condition: Condition, *, negated: bool) -> str:
    assert condition.values is not None
    tokens = sorted(
        _value_token(condition.field, value)
        for _, value in condition.values
        if condition.fits(value)
    )
    if not tokens:
        return ALL_ITEMS if negated else NO_ITEMS
    return _contains(tokens, negated=negated)


def _contains(tokens: list[str], *, negated: bool) -> str:
    expression = (
        f'array_contains(tokens, "{tokens[0]}")'
        if len(tokens) == 1
        else f"array_contains_any(tokens, {quote_list(tokens)})"
    )
    return f"(not {expression})" if negated else expression


def _value_token(name: str, value: Scalar) -> str:
    return _token("value", name, type(value).__name__, _sortable(value))


def _token(kind: str, *parts: str) -> str:
    """Returns the first 128 bits of a SHA-256 digest, in hexadecimal."""
    text = json.dumps([kind, *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:TOKEN_CHARS]


def _span(name: str, kind: type) -> str:
    return f"{kind.__name__[0]}{_token('span', name)}"


def _sortable(value: Scalar) -> str:
    """Returns ASCII text that sorts like the values of its type: by size, or by code point."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").hex()
    (bits,) = struct.unpack(">Q", struct.pack(">d", value + 0.0))  # maps -0.0 to 0.0
    return f"{bits ^ (_ALL_BITS if bits & _SIGN_BIT else _SIGN_BIT):016x}"


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
