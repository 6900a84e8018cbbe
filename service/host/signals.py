"""Signals that end a process of the service."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

from service.timings import SIGNAL_ECHO_S

STOPS: Final = (signal.SIGTERM, signal.SIGINT)
"""The signals of a person, a system or a terminal to the process that they started."""
FINISH: Final = signal.SIGUSR1
"""The signal of a supervisor to its server processes, which ignore `STOPS`."""


def end_at_once(number: int) -> NoReturn:
    """As the signal would have without a handler."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(
        128 + number
    )  # the first process of a container lives on: without a handler it takes no signal


class StopSignals:
    """The signals that one process hears: the first begins its end, a second one ends it at once.

    What comes within a moment of the first is its echo and counts as nothing: a signal to a whole group reaches the
    process by itself, and once more from a wrapper that passes on what it was sent.
    """

    def __init__(self, *, last: Callable[[], None] = lambda: None) -> None:
        """last: done before the process ends at once."""
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
def canceled_by_a_signal(*, within_s: float, stops: Sequence[int] = STOPS) -> Iterator[None]:
    """What the calling task does within, until its loop has handlers of its own; a second signal ends the process.

    An exception out of a handler would be raised wherever the signal comes: between the start of a process and the
    watch over it, and asyncio waits for that process's end for good.

    within_s: the process has ended by then, whatever keeps the loop: large collections, say.
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
