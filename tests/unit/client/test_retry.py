import itertools
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from mlcd.client.retry import pause_s, retry_after_s


@pytest.mark.parametrize("attempt", range(12))
def test_never_before_retry_after_and_not_much_later(attempt):
    for _ in range(200):
        assert 9 <= pause_s(attempt, 9.0) <= 11


def test_waits_grow_up_to_a_bound_and_differ():
    def span(attempt):
        waits = [pause_s(attempt, None) for _ in range(300)]
        return min(waits), max(waits)

    spans = [span(attempt) for attempt in range(12)]
    lows = [low for low, _ in spans]
    assert all(1.5 * low < later for low, later in itertools.pairwise(lows[:6]))
    assert all(0.25 <= low < high <= 10 for low, high in spans)
    assert all(high > 1.15 * low for low, high in spans), (
        "without jitter all clients come back at once"
    )
    assert pause_s(5000, None) <= 10


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3), (" 7 ", 7), ("0", 0), (None, None), ("soon", None), ("", None), ("-1", None)],
)
def test_seconds_are_read_and_nonsense_is_nothing(header, seconds):
    assert retry_after_s(header) == seconds


def test_a_date_is_seconds_from_now():
    now = datetime.now(UTC)
    assert 55 < retry_after_s(format_datetime(now + timedelta(minutes=1), usegmt=True)) <= 60
    assert retry_after_s(format_datetime(now - timedelta(minutes=1), usegmt=True)) == 0
