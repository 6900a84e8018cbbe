"""Signals in processes of their own, because a signal is for a whole process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

OPENING = """
import asyncio, json, os, signal, subprocess, sys, time
from mlcd.service.inference.engine.process import EngineProcess, start_engine
from mlcd.service.inference.served import EngineOptions
from mlcd.service.host.signals import cancel_on_signal

start = subprocess.Popen.__init__

def start_and_be_told(self, *arguments, **options):
    start(self, *arguments, **options)
    signal.raise_signal(signal.SIGTERM)  # before asyncio watches over what was started

subprocess.Popen.__init__ = start_and_be_told

async def main():
    with cancel_on_signal(within_s=30):
        await EngineProcess.open(start_engine(EngineOptions("fake:latency_ms=20000", max_batch=4)))
        raise AssertionError("not canceled")

asyncio.run(main())
print("closed")
"""
BUSY = """
import asyncio, signal, time
from mlcd.service.host.signals import cancel_on_signal

async def main():
    with cancel_on_signal(within_s=0.5):
        print("busy", flush=True)
        time.sleep(60)

asyncio.run(main())
"""
DEAF = """
import signal
from mlcd.service.host.signals import end_at_once
# It stays alive, as the first process of a container does.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
end_at_once(signal.SIGTERM)
"""
IMPORTING = """
import signal
from mlcd.service.host.signals import end_while_it_starts

class Told:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGTERM)

end_while_it_starts(signal.SIGTERM)
class Imported:
    told = Told()
raise SystemExit(7)
"""
EXPORTING = """
import signal, subprocess, sys
from mlcd.service.host.signals import end_while_it_starts

end_while_it_starts(signal.SIGTERM)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
signal.raise_signal(signal.SIGTERM)
"""


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )


def test_a_signal_while_the_engine_starts_cancels_its_opening():
    started = time.monotonic()
    result = run(OPENING)
    assert (result.returncode, result.stdout, result.stderr) == (0, "closed\n", "")
    assert time.monotonic() - started < 15  # not the 20 s of a batch


@pytest.mark.parametrize(("signals", "status"), [(1, 1), (2, -signal.SIGTERM)])
def test_what_keeps_the_loop_does_not_keep_the_process(signals, status):
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "busy\n"
        started = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.25)
        assert process.wait(timeout=20) == status
        assert time.monotonic() - started < 10


def test_the_first_process_of_a_container_ends_too():
    assert run(DEAF).returncode == 128 + signal.SIGTERM


ECHO = """
import signal, time
from mlcd.service.host.signals import StopSignals

signals = StopSignals(last=lambda: print("last", flush=True))
begins = []
signal.signal(signal.SIGINT, lambda number, _: begins.append(signals.begins(number)))
for _ in range(3):
    signal.raise_signal(signal.SIGINT)
print(signals.is_stopping, begins, flush=True)
time.sleep(0.2)
signal.raise_signal(signal.SIGINT)
print("goes on", flush=True)
"""


def test_what_follows_at_once_is_an_echo_and_what_follows_later_ends_the_process():
    result = run(ECHO)
    expected = (-signal.SIGINT, "True [True, False, False]\nlast\n")
    assert (result.returncode, result.stdout) == expected, result.stderr


def test_a_signal_in_the_middle_of_an_import_ends_the_start_without_a_word():
    """Python 3.11 makes a RuntimeError of what a handler raises in `__set_name__`."""
    result = run(IMPORTING)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_what_a_start_has_begun_ends_with_it():
    result = run(EXPORTING)
    assert (result.returncode, result.stderr) == (0, "")
    child, deadline = int(result.stdout), time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()
