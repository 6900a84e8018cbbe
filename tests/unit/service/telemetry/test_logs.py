import io
import json
import logging
import os
import subprocess
import sys
import time

import pytest

from mlcd.service.log import Log
from mlcd.service.telemetry.logs import JsonLines, PlainLines, QueuedLines, configure_logs
from mlcd.service.telemetry.request import RequestRecord, begin_request


def raised(message):
    try:
        try:
            int(message)
        except ValueError as error:
            raise RuntimeError(message) from error
    except RuntimeError as error:
        return error


def record(message="hello", *, error=None, **extra):
    return logging.getLogger("mlcd.test").makeRecord(
        "mlcd.test",
        logging.ERROR,
        __file__,
        1,
        message,
        (),
        error and (type(error), error, None),
        extra=extra,
    )


@pytest.mark.parametrize("lines", [JsonLines(), PlainLines()])
def test_of_an_error_a_line_holds_its_kind_and_not_its_text(lines):
    line = lines.format(record("it failed", error=raised("SECRET")))
    assert "it failed: RuntimeError from ValueError (" in line
    assert "test_logs" in line
    assert "SECRET" not in line
    assert "\n" not in line


def test_a_line_is_one_json_object_with_the_request_that_it_belongs_to():
    def inside():
        begin_request(RequestRecord("r1", {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}))
        return json.loads(JsonLines().format(record(fields={"status": 200, "odd": {1}})))

    import contextvars

    found = contextvars.copy_context().run(inside)
    assert (found["request_id"], found["trace_id"], found["span_id"]) == ("r1", "a" * 32, "b" * 16)
    expected = ("hello", "error", 200, os.getpid())
    assert (found["message"], found["level"], found["status"], found["pid"]) == expected
    assert "request_id" not in json.loads(JsonLines().format(record()))


class Stuck(io.StringIO):
    """Takes nothing until it is let go."""

    def __init__(self):
        super().__init__()
        self.held = True

    def write(self, text):
        while self.held:
            time.sleep(0.001)
        return super().write(text)


def test_a_reader_that_does_not_read_holds_up_nobody_and_learns_what_it_missed():
    stream = Stuck()
    lines = QueuedLines(stream, PlainLines(), max_queued=5)
    started = time.monotonic()
    for number in range(50):
        lines.handle(record(f"line {number}"))
    assert time.monotonic() - started < 2
    stream.held = False
    lines.close()
    text = stream.getvalue()
    assert "line 0" in text
    assert "line 49" not in text
    (told,) = [line for line in text.splitlines() if "lines were dropped" in line]
    # 5 wait, and the thread that hangs has taken at most 6
    assert 39 <= int(told.split()[-4]) <= 45


class Full(io.StringIO):
    """A stream to a disk that is full for a while."""

    full = True

    def write(self, text):
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_loses_lines_and_not_the_log():
    stream = Full()
    lines = QueuedLines(stream, PlainLines())
    lines.handle(record("lost"))
    wait_for(lambda: lines._num_dropped == 1)
    stream.full = False
    lines.handle(record("kept"))
    lines.close()
    assert "lost" not in stream.getvalue()
    assert "kept" in stream.getvalue()
    assert "1 lines were dropped" in stream.getvalue()


@pytest.mark.parametrize("formatter", [JsonLines(), PlainLines()])
def test_a_line_that_cannot_be_made_is_no_error_of_its_caller(formatter):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    lines = QueuedLines(stream, formatter)
    lines.handle(record("a file called \udcff"))
    wrong = record("%d")
    wrong.args = ("x",)
    lines.handle(wrong)
    lines.close()
    text = stream.buffer.getvalue().decode()
    assert "a file called \\udcff" in text
    assert "a line of mlcd.test cannot be formatted: TypeError" in text


def test_lines_are_written_together_as_far_as_a_pipe_takes_them_whole():
    sizes = []

    class Written(io.StringIO):
        def write(self, text):
            sizes.append(len(text))
            return super().write(text)

    stream = Written()
    lines = QueuedLines(stream, PlainLines())
    for number in range(300):
        lines.handle(record(f"{number} " + 90 * "x"))
    lines.handle(record(10_000 * "y"))
    lines.close()
    assert len(stream.getvalue().splitlines()) == 301
    assert max(sizes) > 10_000
    assert all(size <= 4096 for size in sorted(sizes)[:-1])
    assert len(sizes) < 100


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def root():
    logger, ours = logging.getLogger(), logging.getLogger("mlcd")
    before = logger.handlers[:], logger.level, ours.level
    logger.handlers = []
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers = before[0]
    logger.setLevel(before[1])
    ours.setLevel(before[2])


def test_libraries_are_heard_from_warnings_on_and_ours_as_the_level_says(root):
    stream = io.StringIO()
    configure_logs(Log(level="info"), stream)
    logging.getLogger("uvicorn.error").info("not this")
    logging.getLogger("uvicorn.error").warning("library")
    logging.getLogger("mlcd.access").debug("nor this")
    logging.getLogger("mlcd.access").info("ours")
    root.handlers[0].close()
    expected = ["library", "ours"]
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == expected


OPENED_LATER = """
import importlib, logging.config
from mlcd.service.log import Log
from mlcd.service.telemetry.logs import configure_logs

configure, _ = logging.config.dictConfig, configure_logs(Log(format="text"))
importlib.import_module("{module}")
assert logging.config.dictConfig is configure
logging.getLogger("mlcd.service").warning("still heard")
"""


@pytest.mark.parametrize(
    "module", ["mlcd.collections.milvus.store", "mlcd.collections.postgres.store"]
)
def test_a_store_that_is_opened_later_leaves_the_log(module):
    code = OPENED_LATER.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "still heard" in done.stderr
