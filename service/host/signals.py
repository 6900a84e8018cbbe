"""The signals that stop a process of the service."""

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

# The supervisor stops its server processes with this signal; they ignore `STOPS`.
FINISH: Final = signal.SIGUSR1


def end_at_once(number: int) -> NoReturn:
    """Ends the process like the signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    # PID 1 of a container ignores signals that have no handler, and is still running here.
    os._exit(128 + number)


def ignore_hangups() -> None:
    """Makes this process, and processes that it starts, continue when their terminal is closed.

    Many services reload their configuration at SIGHUP. This one reloads keys without a signal, and
    needs a restart for other settings.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def end_while_it_starts(number: int) -> None:
    """Makes this signal end the process and its children with status 0: a process that is starting
    has nothing to finish.

    PID 1 of a container would ignore the signal without a handler. The handler does not raise: an
    exception in the middle of an import may turn into another one, as Python 3.11 turns every
    exception in `__set_name__` into a RuntimeError.
    """

    def end(*_: object) -> None:
        for child in _list_children():
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)  # an export; its unfinished files are recognizable
        os._exit(0)

    signal.signal(number, end)


def _list_children() -> list[int]:
    """Returns the process ids of the children; [] if the system does not list them."""
    lists = Path("/proc/self/task").glob("*/children")
    with suppress(OSError):
        return [int(child) for listing in lists for child in listing.read_text().split()]
    return []


class StopSignals:
    """The stop signals of a process: the first starts a graceful stop, the second ends it at once.

    A second signal within SIGNAL_ECHO_S of the first is ignored: a signal to a process group
    reaches the process directly, and again from a wrapper that forwards its signals.
    """

    def __init__(self, *, last: Callable[[], None] = lambda: None) -> None:
        """last: called before a second signal ends the process."""
        self._last = last
        self._stop_time: float | None = None

    @property
    def is_stopping(self) -> bool:
        return self._stop_time is not None

    def begins(self, number: int) -> bool:
        """Tells whether this signal is the first. A second signal ends the process here."""
        now = time.monotonic()
        if self._stop_time is None:
            self._stop_time = now
            return True
        if now - self._stop_time > SIGNAL_ECHO_S:
            self._last()
            end_at_once(number)
        return False


@contextmanager
def cancel_on_signal(*, within_s: float, stops: Sequence[int] = STOPS) -> Iterator[None]:
    """Cancels the calling task on a stop signal, until its loop has its own handlers.

    A second signal ends the process. The handler cancels instead of raising: an exception could
    occur anywhere, for example after a child was started and before asyncio watches it, and asyncio
    would then wait forever for the child's end.

    within_s: seconds after which the process ends even if the loop is blocked, for example while it
    opens large collections.
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
        if not signals.is_stopping:
            raise
