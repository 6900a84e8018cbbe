"""A real queue, and a process that hears signals as before when a worker in it has ended."""

import contextlib
import signal

import pytest

from service.jobs.embedded import EmbeddedRecords
from service.jobs.queue import Queue


@pytest.fixture(autouse=True)
def signals_as_they_were():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def queue(tmp_path):
    with contextlib.closing(Queue(EmbeddedRecords(tmp_path / "queue.sqlite"))) as opened:
        yield opened
