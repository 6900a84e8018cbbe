"""What API keys have used, by day."""

from datetime import date
from typing import Literal

from mlcd.wire.shapes import WireAnswer


class DayUsage(WireAnswer):
    """What a key has used on a day (UTC). key: its id; null without keys. tokens: those of texts.
    bytes: those of request bodies.
    """

    date: date
    key: str | None
    requests: int
    images: int
    texts: int
    tokens: int
    bytes: int


class UsageList(WireAnswer):
    """The days on which there was any, oldest first. store: `memory` holds what this server process
    has counted since its start.
    """

    object: Literal["list"]
    store: Literal["memory", "sqlite", "redis"]
    data: list[DayUsage]
