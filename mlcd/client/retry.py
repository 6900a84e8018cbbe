"""The time of the next attempt: never before the server's Retry-After, later each time, and
different for each client.
"""

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_FIRST_S: Final = 0.25
_LONGEST_S: Final = 8.0
_DOUBLINGS: Final = 5  # from the first pause to the longest
_MOST_JITTER_S: Final = 2.0


def pause_s(attempt: int, retry_after_s: float | None) -> float:
    """Returns the seconds to wait after the failure of `attempt` (from 0)."""
    least = min(_LONGEST_S, _FIRST_S * 2.0 ** min(attempt, _DOUBLINGS))
    least = least if retry_after_s is None else max(least, retry_after_s)
    # it spreads load and hides nothing
    return least + random.random() * min(least, _MOST_JITTER_S)  # noqa: S311


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
