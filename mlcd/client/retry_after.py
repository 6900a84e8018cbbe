"""The moment from which the server wants the next attempt."""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def retry_after_s(header: str | None) -> float | None:
    """Returns the seconds that a Retry-After header states, by number or date; None where it states
    none.
    """
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (moment.astimezone(UTC) - datetime.now(UTC)).total_seconds())
