"""The cursors of lists: the sort key of a page's last entry, encoded and opaque to clients."""

from typing import Any

import orjson
import pybase64

from mlcd.errors import InvalidInput


def write_cursor(*values: str | float) -> str:
    return pybase64.urlsafe_b64encode(orjson.dumps(values)).decode().rstrip("=")


def read_cursor(cursor: str, *kinds: type[Any]) -> list[Any]:
    """Returns the values of a cursor. Raises InvalidInput unless their types are `kinds`."""
    try:
        values = orjson.loads(pybase64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, orjson.JSONDecodeError) as error:
        raise _invalid_cursor() from error
    if not isinstance(values, list) or [type(value) for value in values] != [*kinds]:
        raise _invalid_cursor()
    return values


def _invalid_cursor() -> InvalidInput:
    return InvalidInput("unknown cursor", remedy="start again without a cursor")
