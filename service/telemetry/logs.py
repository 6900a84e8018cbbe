"""The log: one line per event on standard error, as JSON for programs and plain text on a terminal.

A line never contains a payload, a key or a query string. For an exception it has the class and the
code lines.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from queue import SimpleQueue
from select import PIPE_BUF
from typing import Any, Final, TextIO

import orjson

from mlcd.service.log import Log
from mlcd.service.telemetry.request import current_request
from mlcd.service.timings import LOG_FLUSH_S, LOG_REST_S

_MAX_QUEUED: Final = 10_000  # lines; about 3 MB
_MAX_CODE_LINES: Final = 12  # the innermost code lines of an error


def configure_logs(log: Log, stream: TextIO | None = None) -> None:
    """Sends all logs of the process, with libraries' warnings, to `stream` (default: stderr)."""
    stream = sys.stderr if stream is None else stream
    as_json = not stream.isatty() if log.format == "auto" else log.format == "json"
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(QueuedLines(stream, JsonLines() if as_json else PlainLines()))
    root.setLevel(logging.WARNING)
    logging.getLogger("mlcd").setLevel(log.level.upper())
    # This library would log every unexpected byte of a body.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class JsonLines(logging.Formatter):
    """A line as JSON: time, level, logger, message, pid and the fields of the event.

    A line about a request also has its request_id, trace_id and span_id.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _format_message(record),
            "pid": os.getpid(),
            **_read_request_fields(),
            **getattr(record, "fields", {}),
        }
        try:
            return orjson.dumps(entry, default=str).decode()
        except TypeError:  # text with lone surrogates, such as the name of a file
            return json.dumps(entry, default=str)


class PlainLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        timestamp = (
            datetime.fromtimestamp(record.created)
            .astimezone()
            .isoformat(sep=" ", timespec="milliseconds")
        )
        fields = {**getattr(record, "fields", {}), **_read_request_fields()}
        field_text = "".join(f" {name}={value}" for name, value in fields.items())
        return f"{timestamp} {record.levelname} {record.name} {_format_message(record)}{field_text}"


def _format_message(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return (
        record.getMessage()
        if error is None
        else f"{record.getMessage()}: {kinds(error)} ({places(error)})"
    )


def _read_request_fields() -> dict[str, str]:
    record = current_request()
    if record is None:
        return {}
    ids = record.trace_ids
    return {"request_id": record.request_id} | (
        {} if ids is None else {"trace_id": ids[0], "span_id": ids[1]}
    )


class QueuedLines(logging.Handler):
    """A handler that formats lines immediately and writes them on a separate thread.

    So a slow reader of the log delays no request. Lines in quick succession are written together:
    waking the thread for each would cost more than the line. While too many lines are queued, new
    lines are dropped, and the log says how many.
    """

    def __init__(
        self, stream: TextIO, formatter: logging.Formatter, *, max_queued: int = _MAX_QUEUED
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._stream = stream
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._max_queued = max_queued
        self._num_dropped = 0
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= self._max_queued:
            self._num_dropped += 1
            return
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - a library's wrong call must not fail a request
            line = self.format(
                _make_warning(f"a line of {record.name} cannot be formatted: {kinds(error)}")
            )
        self._lines.put(line.encode(errors="backslashreplace").decode())

    def close(self) -> None:
        self._lines.put(None)
        self._writer.join(LOG_FLUSH_S)
        super().close()

    def _write(self) -> None:
        # the reader of the stream has left, or the stream is closed
        with suppress(BrokenPipeError, ValueError):
            is_closed = False
            while not is_closed:
                queued = [self._lines.get()]
                queued += [self._lines.get() for _ in range(self._lines.qsize())]
                is_closed = None in queued
                lines = [line for line in queued if line is not None]
                if self._num_dropped:
                    num_dropped, self._num_dropped = self._num_dropped, 0
                    lines.append(self.format(_make_warning(f"{num_dropped} lines were dropped")))
                for group in _group_lines(lines):
                    self._write_lines(group)
                if not is_closed:
                    time.sleep(LOG_REST_S)

    def _write_lines(self, lines: list[str]) -> None:
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:  # for example a full disk, which may have space again later
            self._num_dropped += len(lines)


def _group_lines(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yields groups of at most PIPE_BUF bytes: larger writes of several processes would mix."""
    group: list[str] = []
    size = 0
    for line in lines:
        num_bytes = len(line.encode()) + 1
        if group and size + num_bytes > PIPE_BUF:
            yield group
            group, size = [], 0
        group.append(f"{line}\n")
        size += num_bytes
    if group:
        yield group


def _make_warning(message: str) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": "mlcd.service",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": message,
        }
    )


def kinds(error: BaseException | None) -> str:
    """Returns the class names of an error and of its causes, outermost first."""
    names = []
    while error is not None:
        names.append(type(error).__name__)
        error = error.__cause__
    return " from ".join(names)


def places(error: BaseException) -> str:
    """Returns the modules and lines in an error's traceback, outermost first, then its cause's."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        lines.append(f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}")
        trace = trace.tb_next
    cause = error.__cause__
    cause_text = "" if cause is None else f" from {type(cause).__name__} {places(cause)}"
    return " > ".join(lines[-_MAX_CODE_LINES:]) + cause_text
