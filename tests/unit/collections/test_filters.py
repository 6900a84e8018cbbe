"""Filters mean what Python means by them, are bounded, and say what is wrong with them."""

import json
import operator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcd.collections.columns import Columns
from mlcd.collections.filters import parse_filter
from mlcd.collections.item import encode_metadata
from mlcd.errors import InvalidInput

SCALARS = st.sampled_from(["", "a", "b", "é", 0, 1, 1.0, 2.5, -3, True, False])
VALUES = SCALARS | st.none() | st.lists(SCALARS, max_size=3) | st.just({"nested": 1})
METADATA = st.dictionaries(st.sampled_from("xyz"), VALUES)
RANGES = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
ORDERED = st.sampled_from(["", "a", "b", 0, 1, 2.5])
CONDITIONS = st.one_of(
    st.builds(lambda field, value: {"field": field, "eq": value}, st.sampled_from("xyz"), SCALARS),
    st.builds(
        lambda field, values: {"field": field, "in": values},
        st.sampled_from("xyz"),
        st.lists(SCALARS),
    ),
    st.builds(
        lambda field, bounds: {"field": field, **bounds},
        st.sampled_from("xyz"),
        st.dictionaries(st.sampled_from(sorted(RANGES)), ORDERED, min_size=1),
    ),
    st.builds(
        lambda field, values, bounds: {"field": field, "in": values, **bounds},
        st.sampled_from("xyz"),
        st.lists(SCALARS, min_size=1),
        st.dictionaries(st.sampled_from(sorted(RANGES)), ORDERED, min_size=1),
    ),
)
FILTERS = st.recursive(
    CONDITIONS,
    lambda inner: st.one_of(
        st.builds(lambda part: {"not": part}, inner),
        st.builds(
            lambda name, parts: {name: parts},
            st.sampled_from(["and", "or"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=6,
)


def kind(value):
    return bool if isinstance(value, bool) else str if isinstance(value, str) else float


def same(left, right):
    return kind(left) is kind(right) and left == right


def holds(filter_, metadata):
    if "not" in filter_:
        return not holds(filter_["not"], metadata)
    if "and" in filter_:
        return all(holds(part, metadata) for part in filter_["and"])
    if "or" in filter_:
        return any(holds(part, metadata) for part in filter_["or"])
    value = metadata.get(filter_["field"])
    entries = (
        value
        if isinstance(value, list)
        else [value]
        if isinstance(value, str | int | float)
        else []
    )
    return any(
        all(
            (name == "eq" and same(entry, bound))
            or (name == "in" and any(same(entry, wanted) for wanted in bound))
            or (name in RANGES and kind(entry) is kind(bound) and RANGES[name](entry, bound))
            for name, bound in filter_.items()
            if name != "field"
        )
        for entry in entries
    )


@dataclass(frozen=True)
class Known:
    columns: Columns
    num_positions: int
    position_of: dict[str, int] = field(default_factory=dict)


@settings(max_examples=200, deadline=None)
@given(st.lists(METADATA, max_size=12), FILTERS)
def test_they_agree_with_plain_python(items, filter_):
    columns = Columns()
    columns.append(0, dict.fromkeys("xyz", "known"))
    for position, metadata in enumerate(items, 1):
        columns.append(position, json.loads(encode_metadata("i", metadata)))
    found = parse_filter(filter_).matches(Known(columns, len(items) + 1))
    assert found.tolist()[1:] == [holds(filter_, metadata) for metadata in items]
    order = np.random.default_rng(0).permutation(len(items) + 1)
    again = parse_filter(filter_).matches(
        Known(columns.take(order, len(items) + 1), len(items) + 1)
    )
    assert again.tolist() == found[order].tolist()


def nested(depth):
    filter_ = {"field": "x", "eq": 1}
    for _ in range(depth):
        filter_ = {"not": filter_}
    return filter_


@pytest.mark.parametrize(
    ("filter_", "message"),
    [
        (nested(1500), "nested too deep"),
        (nested(8), "nested too deep"),
        ({"and": [{"field": "x", "eq": n} for n in range(129)]}, "too many conditions"),
        ({"field": "x", "in": list(range(1025))}, "must be a list of values"),
        ({"field": "x", "like": "a%"}, "one of the operators eq.*'like'"),
        ({"field": "x"}, "none"),
        ({"field": "", "eq": 1}, "must name a field"),
        ({"field": "f" * 129, "eq": 1}, "must name a field"),
        ({"field": ["x"], "eq": 1}, "must name a field"),
        ({"field": "x", "eq": None}, "cannot be compared"),
        ({"field": "x", "eq": [1]}, "cannot be compared"),
        ({"field": "x", "in": "abc"}, "must be a list of values"),
        ({"field": "x", "lt": True}, "cannot be ordered"),
        ({"field": "x", "lt": None}, "cannot be ordered"),
        ({"field": "x", "eq": 10**400}, "within ±2"),
        ({"field": "x", "eq": 2**53 + 1}, "number of 'x'.*within ±2"),
        ({"field": "x", "in": [1, -(2**53) - 1]}, "number of 'x'.*within ±2"),
        ({"field": "x", "ge": 2**63}, "number of 'x'.*within ±2"),
        ({"not": {"or": [{"field": "x", "lt": float("inf")}]}}, "must be finite"),
        ({"field": "x", "eq": float("nan")}, "must be finite"),
        ({"and": []}, "must be a list of filters"),
        ({"or": "x"}, "must be a list of filters"),
        ({"not": [], "or": []}, "must be the only key"),
        ({"id": {"in": ["a"]}, "field": "x"}, "must be the only key"),
        ({"id": {"in": "a"}}, "must be a list of ids"),
        ({"id": {"in": [1]}}, "must be a list of ids"),
        ({"id": "a"}, "must be a list of ids"),
        ({"id": {"in": [], "eq": "a"}}, "must be a list of ids"),
        ({"id": {"in": ["a"] * 10_001}}, "names 10001 ids"),
        ({"and": [{"id": {"in": ["a"]}}] * 129}, "too many conditions"),
        ({}, "JSON object"),
        ([], "JSON object"),
        ("color = red", "JSON object"),
        (None, "JSON object"),
    ],
)
def test_what_is_wrong_is_said(filter_, message):
    with pytest.raises(InvalidInput, match=message):
        parse_filter(filter_)


def test_ids_are_a_condition_like_others(filled):
    def found(filter_):
        answer = filled.search(filled.embedding_of("i1"), 400, filter=filter_)
        return sorted(match.id for match in answer.matches[0])

    wanted = {"id": {"in": ["i1", "i4", "i7", "nobody"]}}
    assert found(wanted) == ["i1", "i4", "i7"]
    assert found({"and": [wanted, {"field": "odd", "eq": True}]}) == ["i1", "i7"]
    assert len(found({"not": wanted})) == 397
    assert found({"id": {"in": []}}) == []
    filled.delete("i4")
    assert found(wanted) == ["i1", "i7"]


def test_seven_levels_are_possible():
    columns = Columns()
    columns.append(0, {"x": 1})
    assert parse_filter(nested(6)).matches(Known(columns, 1)).tolist() == [True]
    assert parse_filter(nested(7)).matches(Known(columns, 1)).tolist() == [False]


def test_the_largest_exact_integers_are_found():
    columns = Columns()
    for position, number in enumerate((2**53, -(2**53), 2**53 - 1)):
        columns.append(position, {"x": number})
    for number, found in ((2**53, [True, False, False]), (-(2**53), [False, True, False])):
        condition = parse_filter({"field": "x", "eq": number})
        assert condition.matches(Known(columns, 3)).tolist() == found
