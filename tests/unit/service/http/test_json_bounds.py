"""Excessive JSON is recognized before it is parsed."""

import json
import random

import pytest

from mlcd.service.errors import BadRequest, TooLarge
from mlcd.service.http.bodies import load_json
from mlcd.service.http.json_bounds import check_json
from mlcd.service.settings import Limits

LIMITS = Limits(max_json_bytes=2**20, max_json_text_bytes=2**14, max_json_values=20_000)
LONG = 2**19  # bytes of a string that is an image, far more than there may be text


def refused_by(body):
    try:
        check_json(body, LIMITS)
    except TooLarge as error:
        return error.limit
    return None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"images": ["data:image/png;base64,%b"]}' % (b"A" * LONG), id="an image"),
        pytest.param(b'["%b"]' % (b"AAAA\\/" * (LONG // 6)), id="an image as PHP writes it"),
        pytest.param(
            b'["%b", "%b"]' % (b"A" * LONG, "漢字".encode() * 1000), id="an image beside other text"
        ),
        pytest.param(json.dumps({"embeddings": [[0.5] * 384] * 40}).encode(), id="embeddings"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_clients_send_is_taken(body):
    assert refused_by(body) is None


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        pytest.param(b" " * (2**20 + 1), "max_json_bytes", id="large"),
        pytest.param(b"[" + b"1," * 20_001 + b"1]", "max_json_values", id="numbers"),
        pytest.param(b"[" + b"[]," * 2_000 + b"1]", "max_json_values", id="lists"),
        pytest.param(b"[" * 2_001, "max_json_values", id="nested lists"),
        pytest.param(b"{" + b'"a":1,' * 2_000 + b"}", "max_json_values", id="fields"),
        pytest.param(b'"' * 20_001, "max_json_values", id="quotes"),
        pytest.param(
            b'["%b\xf0\x9f\x98\x80"]' % (b"A" * LONG), "max_json_text_bytes", id="one emoji"
        ),
        pytest.param(
            b'["%b\\ud83d\\ude00"]' % (b"A" * LONG), "max_json_text_bytes", id="one emoji, escaped"
        ),
        pytest.param(
            b'["\xf0\x9f\x98\x80\\"%b"]' % (b"A" * LONG),
            "max_json_text_bytes",
            id="after an escaped quote",
        ),
        pytest.param(
            b'["%b\\"\xf0\x9f\x98\x80"]' % (b"A" * LONG),
            "max_json_text_bytes",
            id="before an escaped quote",
        ),
        pytest.param(b'["%b"]' % (b"\\n" * (LONG // 2)), "max_json_text_bytes", id="escapes"),
        pytest.param(b'["%b"]' % ("漢".encode() * (LONG // 3)), "max_json_text_bytes", id="text"),
        pytest.param(
            b"[" + b'"abcdefgh",' * 3_000 + b"1]", "max_json_text_bytes", id="many short strings"
        ),
    ],
)
def test_what_would_stop_everybody_else_is_refused(body, limit):
    assert refused_by(body) == limit


def test_no_string_that_is_taken_needs_more_than_a_byte_a_character_beyond_the_text():
    """Random strings of all that matters, against Python's own idea of how wide they are."""
    draw = random.Random(7)
    parts = [b"A" * 5000, b"\\/", b'\\"', b"\\\\", b"\\u00e9", b'","', b"A"]
    parts += ["é".encode(), "😀".encode()]
    taken = 0
    for _ in range(2000):
        body = b'["%b"]' % b"".join(draw.choices(parts, k=draw.randrange(1, 12)))
        if refused_by(body) is not None:
            continue
        taken += 1
        wide = [len(text) for text in json.loads(body) if not text.isascii()]
        assert sum(wide) <= LIMITS.max_json_text_bytes
    assert taken > 500


def test_json_is_parsed_within_its_bounds():
    assert load_json(b'{"a": [1, "b"]}', LIMITS) == {"a": [1, "b"]}
    with pytest.raises(TooLarge, match="at most 20000 values"):
        load_json(b"[" * 3_000, LIMITS)
    with pytest.raises(BadRequest, match="must be JSON"):
        load_json(b'{"a": ', LIMITS)
