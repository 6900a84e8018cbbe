"""A real queue, and a process that hears signals as before when a worker in it has ended."""

import contextlib
import signal

import pytest

from mlcd.service.jobs.queue import Queue
from mlcd.service.jobs.sqlite import SqliteDatabase
from tests.conftest import write_digits


@pytest.fixture(autouse=True)
def signals_as_they_were():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def queue(tmp_path):
    with contextlib.closing(Queue(SqliteDatabase(tmp_path / "queue.sqlite"))) as opened:
        yield opened


@pytest.fixture
def short_pauses(monkeypatch):
    for name in ("AFTER_FAILURE_S", "WORKER_IDLE_S", "ENGINE_AWAY_S"):
        monkeypatch.setattr(f"mlcd.service.worker.loop.{name}", 0.05)
    monkeypatch.setattr("mlcd.service.worker.loop.QUEUE_FIRST_WAIT_S", 0.02)
    monkeypatch.setattr("mlcd.service.jobs.transitions.FIRST_PAUSE_S", 0.05)


@pytest.fixture
def images(tmp_path):
    return write_digits(tmp_path / "images", 40)
