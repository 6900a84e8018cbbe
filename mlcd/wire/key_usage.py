"""The usage of API keys by day."""

from datetime import date
from typing import Literal

from mlcd.wire.shapes import WireAnswer


class DayUsage(WireAnswer):
    """The usage of a key on a day (UTC). key: its id; null without keys. tokens: those of texts.
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
    """The days with any usage, oldest first. store: `memory` has what this server process has
    counted since its start.
    """

    object: Literal["list"]
    store: Literal["memory", "sqlite", "redis"]
    data: list[DayUsage]
