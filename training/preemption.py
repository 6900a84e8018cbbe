"""Stop signals: outside of the training loop they end the run at once, in it after a step."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NoReturn

# The signals that job schedulers send before they preempt a job.
_PREEMPTING: Final = (signal.SIGTERM, signal.SIGUSR1)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C arrived; a checkpoint of the last step is on disk."""


class Preempted(Interrupted):
    """SIGTERM or SIGUSR1 arrived; a checkpoint of the last step is on disk.

    step: None outside of the loop.
    """

    def __init__(self, step: int | None) -> None:
        super().__init__()
        self.step = step


class Signals:
    """The signals that this process has received so far."""

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
    """Makes SIGTERM and SIGUSR1 raise Preempted, as Ctrl-C raises KeyboardInterrupt.

    This is safe outside of the loop, where all finished work is on disk.
    """

    def stop(_: int, __: object) -> NoReturn:
        raise Preempted(None)

    with _handle(_PREEMPTING, stop):
        yield


# The signals forwarded by another process, for a process that receives none itself.
_FORWARDED: Final[ContextVar[Signals | None]] = ContextVar("forwarded_signals", default=None)


@contextmanager
def use_signals(signals: Signals) -> Iterator[None]:
    """Makes the loop act on signals that another process forwards, instead of its own."""
    token = _FORWARDED.set(signals)
    try:
        yield
    finally:
        _FORWARDED.reset(token)


@contextmanager
def receive_signals() -> Iterator[Signals]:
    """Collects SIGINT, SIGTERM and SIGUSR1 instead of ending the process."""
    if (forwarded := _FORWARDED.get()) is not None:
        yield forwarded
        return
    signals = Signals()
    with _handle((signal.SIGINT, *_PREEMPTING), signals.receive):
        yield signals


@contextmanager
def _handle(
    numbers: Iterable[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)
