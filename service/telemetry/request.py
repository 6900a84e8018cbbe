"""The record of the current request, for its log line, its trace and calls to other services."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_MAX_TRACESTATE: Final = (
    512  # characters; W3C Trace Context requires to pass on at least this number
)


@dataclass
class RequestRecord:
    """The record of one request.

    trace_headers: `traceparent` and `tracestate`, for calls to other services. num_images,
    num_texts: None for a request without images or texts. stages: name to start and end, times of
    time.perf_counter, from the first item's start to the last item's end. used: `images` and
    `texts` that were embedded, the `tokens` of these texts, `bytes` of the body.
    """

    request_id: str
    trace_headers: dict[str, str] = field(default_factory=dict)
    num_images: int | None = None
    num_texts: int | None = None
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    used: Counter[str] = field(default_factory=Counter)

    @property
    def counts(self) -> dict[str, int]:
        """The number of images and of texts, without numbers that are None."""
        counts = {"images": self.num_images, "texts": self.num_texts}
        return {name: num for name, num in counts.items() if num is not None}

    @property
    def trace_ids(self) -> tuple[str, str] | None:
        """The ids of the trace and of the span in hexadecimal, or None."""
        parts = self.trace_headers.get("traceparent", "").split("-")
        return (parts[1], parts[2]) if len(parts) == 4 else None

    def took(self, stage: str, started: float, ended: float) -> None:
        earlier = self.stages.get(stage, (started, ended))
        self.stages[stage] = min(earlier[0], started), max(earlier[1], ended)


_current: ContextVar[RequestRecord | None] = ContextVar("request", default=None)


def begin_request(record: RequestRecord) -> None:
    """Sets the record of the running task and of tasks that it starts."""
    _current.set(record)


def current_request() -> RequestRecord | None:
    """Returns the current record; None outside of a request, for example in a test inference."""
    return _current.get()


def count_images(num: int) -> None:
    if (record := _current.get()) is not None:
        record.num_images = num


def count_texts(num: int) -> None:
    if (record := _current.get()) is not None:
        record.num_texts = num


def count_used(**counts: int) -> None:
    """Adds to what the current request has used."""
    if (record := _current.get()) is not None:
        record.used.update(counts)


def took(stage: str, started: float, ended: float) -> None:
    """Adds a stage to the current record, if any. started, ended: times of time.perf_counter."""
    if (record := _current.get()) is not None:
        record.took(stage, started, ended)


def stage_s(stage: str) -> float | None:
    """Returns the seconds of a stage so far, from its first item's start; None if not started."""
    record = _current.get()
    if record is None or stage not in record.stages:
        return None
    started, ended = record.stages[stage]
    return ended - started


@contextmanager
def time_stage(stage: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        took(stage, started, time.perf_counter())


def read_trace(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Returns the trace headers of a request; {} if they are malformed or missing."""
    parent = headers.get(b"traceparent", b"").decode("latin-1")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    state = headers.get(b"tracestate", b"").decode("latin-1")
    is_valid = 0 < len(state) <= _MAX_TRACESTATE and state.isascii() and state.isprintable()
    return {"traceparent": parent} | ({"tracestate": state} if is_valid else {})
