"""The stores of the usage of API keys, by day."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

from mlcd.errors import Unavailable
from mlcd.service.timings import USAGE_SQLITE_S

KINDS: Final = ("requests", "images", "texts", "tokens", "bytes")
# Counts by day (UTC, ISO 8601) and id of the key; the id is empty on a server without keys.
Usage: TypeAlias = dict[tuple[str, str], Counter[str]]

_TABLE: Final = f"""
CREATE TABLE IF NOT EXISTS usage (
  day TEXT, key TEXT, {", ".join(f"{kind} INTEGER NOT NULL" for kind in KINDS)},
  PRIMARY KEY (day, key)
) WITHOUT ROWID
"""
_ADD: Final = (
    f"INSERT INTO usage VALUES (?, ?{', ?' * len(KINDS)}) ON CONFLICT DO UPDATE SET "  # noqa: S608
    + ", ".join(f"{kind} = {kind} + excluded.{kind}" for kind in KINDS)
)


class UsageStore(Protocol):
    """A store, whose methods block. They raise Unavailable while it cannot be read or written."""

    @property
    def kind(self) -> Literal["memory", "sqlite", "redis"]: ...

    def add(self, batch_id: str, usage: Usage) -> None:
        """Adds counts. An id that is repeated, after an answer that was lost, adds nothing."""
        ...

    def read(self, first: date, last: date) -> Usage:
        """Returns the usage of the days from `first` to `last`."""
        ...


class MemoryUsage:
    """A `UsageStore` that ends with the process."""

    kind: Final = "memory"

    def __init__(self, keep_days: int) -> None:
        self._keep_days = keep_days
        self._usage: Usage = {}

    def add(self, batch_id: str, usage: Usage) -> None:  # noqa: ARG002 - no answer is lost here
        for place, counts in usage.items():
            self._usage.setdefault(place, Counter()).update(counts)
        oldest = oldest_day(self._keep_days).isoformat()
        self._usage = {place: counts for place, counts in self._usage.items() if place[0] >= oldest}

    def read(self, first: date, last: date) -> Usage:
        days = first.isoformat(), last.isoformat()
        return {
            place: counts for place, counts in self._usage.items() if days[0] <= place[0] <= days[1]
        }


class SqliteUsage:
    """A `UsageStore` in an SQLite file that server processes share.

    Each call opens the file: one that was replaced or mended is used at once.
    """

    kind: Final = "sqlite"

    def __init__(self, path: Path, keep_days: int) -> None:
        self._path, self._keep_days = path, keep_days

    def add(self, batch_id: str, usage: Usage) -> None:  # noqa: ARG002 - a transaction that failed added nothing
        rows = [
            (day, key, *(counts[kind] for kind in KINDS)) for (day, key), counts in usage.items()
        ]
        with self._open() as connection:
            connection.executemany(_ADD, rows)
            oldest = oldest_day(self._keep_days).isoformat()
            connection.execute("DELETE FROM usage WHERE day < ?", (oldest,))

    def read(self, first: date, last: date) -> Usage:
        with self._open() as connection:
            rows = connection.execute(
                "SELECT * FROM usage WHERE day BETWEEN ? AND ?",
                (first.isoformat(), last.isoformat()),
            ).fetchall()
        return {
            (day, key): Counter(dict(zip(KINDS, nums, strict=True))) for day, key, *nums in rows
        }

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Opens the file for one transaction; nothing is written where the block raises."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with (
                closing(sqlite3.connect(self._path, timeout=USAGE_SQLITE_S)) as connection,
                connection,
            ):
                connection.execute(_TABLE)
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(
                "the usage of keys cannot be read or written now",
                remedy=f"check the space, the rights and the content of {self._path.name}",
            ) from error


def today() -> date:
    """Returns the day, in UTC."""
    return datetime.now(UTC).date()


def oldest_day(keep_days: int) -> date:
    """Returns the oldest day that is kept."""
    return today() - timedelta(days=keep_days)
