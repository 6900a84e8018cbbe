"""Signals as a question that the loop asks between steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_PREEMPTING: Final = (signal.SIGTERM, signal.SIGUSR1)  # what job schedulers send before they take a machine away


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came; a checkpoint of the reached step is on disk."""


class Preempted(Interrupted):
    """SIGTERM or SIGUSR1 came; a checkpoint of the reached step is on disk."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step


class Signals:
    """What came to this process so far."""

    def __init__(self) -> None:
        self.interrupted = False
        self.preempted = False

    def receive(self, number: int, _: object) -> None:
        if number in _PREEMPTING:
            self.preempted = True
        else:
            self.interrupted = True


@contextmanager
def received_signals() -> Iterator[Signals]:
    """Collect SIGINT, SIGTERM and SIGUSR1 instead of dying of them."""
    signals = Signals()
    previous = {number: signal.signal(number, signals.receive) for number in (signal.SIGINT, *_PREEMPTING)}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
