"""The signals that end a process of the service."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from mlcd.child import STOPS
from mlcd.service.timings import SIGNAL_ECHO_S

# A supervisor sends this to its server processes, which ignore `STOPS`.
FINISH: Final = signal.SIGUSR1


def end_at_once(number: int) -> NoReturn:
    """Ends the process as the signal would without a handler."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    # The first process of a container gets no signal without a handler, and is still alive here.
    os._exit(128 + number)


def ignore_hangups() -> None:
    """Has this process, and those that it starts, go on when their terminal is closed.

    Many services read their configuration anew at SIGHUP. Here keys are, without it; other settings
    need a restart.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def end_while_it_starts(number: int) -> None:
    """Ends the process and its children, successfully, at this signal: it has nothing to finish
    yet.

    The first process of a container ignores the signal until it has a handler. One that raised
    would do so in the middle of an import, which may make another error of it: Python 3.11 makes a
    RuntimeError of whatever comes up in `__set_name__`.
    """

    def end(*_: object) -> None:
        for child in _children():
            with suppress(OSError):
                os.kill(
                    child, signal.SIGKILL
                )  # an export, whose unfinished files are known as such
        os._exit(0)

    signal.signal(number, end)


def _children() -> list[int]:
    """Returns the process ids of the children; none where the system does not tell."""
    lists = Path("/proc/self/task").glob("*/children")
    with suppress(OSError):
        return [int(child) for listing in lists for child in listing.read_text().split()]
    return []


class StopSignals:
    """The stop signals of one process: the first begins its end, a second one ends it at once.

    A signal within SIGNAL_ECHO_S of the first is its echo and does not count: a signal to a whole
    group reaches the process directly, and again from a wrapper that passes on its signals.
    """

    def __init__(self, *, last: Callable[[], None] = lambda: None) -> None:
        """Takes the last action. last: it is done before the process ends at once."""
        self._last = last
        self._began_s: float | None = None

    @property
    def begun(self) -> bool:
        return self._began_s is not None

    def begins(self, number: int) -> bool:
        """Tells whether this signal is the first. A second one ends the process here."""
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s
            return True
        if now_s - self._began_s > SIGNAL_ECHO_S:
            self._last()
            end_at_once(number)
        return False


@contextmanager
def cancel_on_signal(*, within_s: float, stops: Sequence[int] = STOPS) -> Iterator[None]:
    """Cancels the calling task on a stop signal, until its loop has handlers of its own.

    A second signal ends the process. A handler that raised would do so wherever the signal comes,
    for example between the start of a child and the watch over it: asyncio would then wait forever
    for the child's end.

    within_s: the process ends by then, even where the loop is blocked, for example by large
    collections.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals = StopSignals()

    def cancel(number: int, _: FrameType | None) -> None:
        if signals.begins(number):
            signal.setitimer(signal.ITIMER_REAL, within_s)
            loop.call_soon_threadsafe(task.cancel)

    for number in stops:
        signal.signal(number, cancel)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    try:
        yield
    except asyncio.CancelledError:
        if not signals.begun:
            raise
