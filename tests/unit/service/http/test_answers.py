"""Negotiation by RFC 9110, 12.5.1."""

import contextlib

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from mlcd.service.errors import NotAcceptable
from mlcd.service.http.answers import ARROW, JSON, NPY, RAW, negotiate

OFFERED = (JSON, RAW, NPY, ARROW)


def asked(accept):
    return Request(
        {"type": "http", "headers": [] if accept is None else [(b"accept", accept.encode())]}
    )


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, JSON),
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("application/x-npy", NPY),
        ("Application/X-NPY; q=0.5", NPY),
        ("text/html, application/octet-stream", RAW),
        ("application/json;q=0.2, application/x-npy;q=0.9", NPY),
        ("application/x-npy;q=0, */*", JSON),
        ("application/json;q=high, application/x-npy", NPY),
        ("application/json;q=0, */*", RAW),  # more of such against the oracle below
        ("application/x-npy, application/octet-stream", RAW),
        # A parameter may hold anything; no offer has one.
        ("application/json;charset=utf-8", JSON),
        ("application/json;version=2;q=0, application/json", JSON),
        ("application/json;version=2, application/json;q=0, application/x-npy;q=0.1", NPY),
        ('text/plain;of="a,application/json;q=1", application/x-npy;q=0.1', NPY),
        ('application/x-npy;of="\\",application/json', NPY),
        # Elements and weights that are none.
        (",, application/x-npy ,", NPY),
        (",", JSON),
        ("application/json;q=high, */*;q=0.1", JSON),
        ("application/json;q=2, application/x-npy;q=0.1", NPY),
        ("application/json;q=-1, application/x-npy;q=0.1", NPY),
        ("application/json;q=inf, application/x-npy;q=0.1", NPY),
        ("application/json;q=, application/x-npy;q=0.1", NPY),
        # What Java's own client sends.
        ("text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2", JSON),
    ],
)
def test_the_preferred_media_type_is_chosen(accept, chosen):
    assert negotiate(asked(accept), OFFERED) == chosen


REFUSED = ("text/html", "application/json;q=0", "image/*", "application/x-npy;q=nan", "*/*;q=0")
REFUSED += ("*/*;q=0.0", "text/*, application/*;q=0, */*", "*/json", "applications/json")


@pytest.mark.parametrize("accept", [*REFUSED, "application/js", '"application/json"'])
def test_what_cannot_be_given_is_refused(accept):
    with pytest.raises(NotAcceptable, match="must allow one of"):
        negotiate(asked(accept), OFFERED)


def test_lines_of_the_header_are_one_list():
    lines = [(b"accept", b"application/json;q=0.1"), (b"accept", b"application/x-npy")]
    assert negotiate(Request({"type": "http", "headers": lines}), OFFERED) == NPY


@pytest.mark.timeout(60)
def test_a_hostile_header_takes_no_time_to_speak_of():
    for accept in (
        '"\\' * 30_000,
        ',"' * 30_000,
        "application/json;q=0," * 3_000 + "*/*",
        "0" * 60_000,
    ):
        with contextlib.suppress(NotAcceptable):
            negotiate(asked(accept), OFFERED)


KINDS = ("*/*", "application/*", *OFFERED, "text/*", "text/html")
WEIGHTS = ("", ";q=0", ";q=0.0", ";q=0.001", ";q=0.25", "; Q=0.5 ", ";q=1", ";q=1.000")


def oracle(ranges):
    """Each range, from the least specific to the most, writes its weight on every type that it
    holds.
    """
    weight, named = dict.fromkeys(OFFERED, 0.0), dict.fromkeys(OFFERED, 0)
    for rank, holds in enumerate(
        (lambda kind, _: kind == "*/*", lambda kind, _: kind == "application/*", str.__eq__)
    ):
        for offer in OFFERED:
            said = [float(text.strip("; Qq=") or 1) for kind, text in ranges if holds(kind, offer)]
            if said:
                weight[offer], named[offer] = max(said), rank
    best = min(OFFERED, key=lambda offer: (-weight[offer], -named[offer], OFFERED.index(offer)))
    return best if weight[best] else None


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(WEIGHTS)), min_size=1, max_size=6)
)
def test_whatever_is_asked_for_the_most_specific_range_decides(ranges):
    accept = ", ".join(kind + weight for kind, weight in ranges)
    try:
        assert negotiate(asked(accept), OFFERED) == oracle(ranges)
    except NotAcceptable:
        assert oracle(ranges) is None
