"""Signals that end a process of the service."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

STOPS: Final = (signal.SIGTERM, signal.SIGINT)


def end_at_once(number: int) -> NoReturn:
    """As the signal would have without a handler."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # the first process of a container lives on: without a handler it takes no signal


@contextmanager
def canceled_by_a_signal(*, within_s: float) -> Iterator[None]:
    """What the calling task does within, until its loop has handlers of its own; a second signal ends the process.

    An exception out of a handler would be raised wherever the signal comes: between the start of a process and the
    watch over it, and asyncio waits for that process's end for good.

    within_s: the process has ended by then, whatever keeps the loop: large collections, say.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told = False

    def cancel(number: int, _: FrameType | None) -> None:
        nonlocal told
        if told:
            end_at_once(number)
        told = True
        signal.setitimer(signal.ITIMER_REAL, within_s)
        loop.call_soon_threadsafe(task.cancel)

    for number in STOPS:
        signal.signal(number, cancel)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    try:
        yield
    except asyncio.CancelledError:
        if not told:
            raise
