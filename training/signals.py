"""Signals: before and after the loop they end the run at once, in the loop they are a question asked between steps."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

_PREEMPTING: Final = (
    signal.SIGTERM,
    signal.SIGUSR1,
)  # what job schedulers send before they take a machine away


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came; a checkpoint of the reached step is on disk."""


class Preempted(Interrupted):
    """SIGTERM or SIGUSR1 came; a checkpoint of the reached step is on disk. step: None outside of the loop."""

    def __init__(self, step: int | None) -> None:
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
def preemptible() -> Iterator[None]:
    """SIGTERM and SIGUSR1 raise Preempted, as Ctrl-C raises: outside of the loop all that is done is on disk."""

    def stop(_: int, __: object) -> NoReturn:
        raise Preempted(None)

    with _handled(_PREEMPTING, stop):
        yield


@contextmanager
def received_signals() -> Iterator[Signals]:
    """Collect SIGINT, SIGTERM and SIGUSR1 instead of dying of them."""
    signals = Signals()
    with _handled((signal.SIGINT, *_PREEMPTING), signals.receive):
        yield signals


@contextmanager
def _handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
