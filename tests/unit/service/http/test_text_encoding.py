"""The size of a request's texts, before any is tokenized."""

import pytest

from mlcd.service.errors import TooLarge
from mlcd.service.http.text_encoding import _count_charged, check_num_chars
from mlcd.service.settings import Limits

LIMITS = Limits(max_text_chars=5000, rate_chars=1000, max_request_chars=10_000)


def test_a_long_text_counts_several_times_for_a_key():
    counted = {"": 1, "red": 1, "x" * 1000: 1, "x" * 1001: 2, "x" * 5000: 5}
    assert [_count_charged([text], LIMITS) for text in counted] == [*counted.values()]
    # those that are rejected unread are one each
    assert _count_charged(["x" * 5001, 7, None, "x" * 2000], LIMITS) == 5


def test_the_characters_of_a_request_are_bounded():
    check_num_chars(10_000, LIMITS)
    with pytest.raises(TooLarge, match="got 10001") as refused:
        check_num_chars(10_001, LIMITS)
    assert refused.value.limit == "max_request_chars"
