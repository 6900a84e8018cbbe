from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from mlcd.backoff import read_retry_after


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3), (" 7 ", 7), ("0", 0), (None, None), ("soon", None), ("", None), ("-1", None)],
)
def test_seconds_are_read_and_nonsense_is_nothing(header, seconds):
    assert read_retry_after(header) == seconds


def test_a_date_is_seconds_from_now():
    now = datetime.now(UTC)
    assert 55 < read_retry_after(format_datetime(now + timedelta(minutes=1), usegmt=True)) <= 60
    assert read_retry_after(format_datetime(now - timedelta(minutes=1), usegmt=True)) == 0
