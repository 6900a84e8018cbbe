"""Signals end the run at once outside of the loop; the loop asks for them between steps."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NoReturn

# The signals that job schedulers send before they take a machine away.
_PREEMPTING: Final = (signal.SIGTERM, signal.SIGUSR1)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C arrived; a checkpoint of the reached step is on disk."""


class Preempted(Interrupted):
    """SIGTERM or SIGUSR1 arrived; a checkpoint of the reached step is on disk.

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
    """Makes SIGTERM and SIGUSR1 raise Preempted, just as Ctrl-C raises.

    Outside of the loop everything that is done is on disk.
    """

    def stop(_: int, __: object) -> NoReturn:
        raise Preempted(None)

    with _handle(_PREEMPTING, stop):
        yield


# Those of a process that another one asks to end; it gets no signals itself.
_GIVEN: Final[ContextVar[Signals | None]] = ContextVar("given", default=None)


@contextmanager
def use_signals(signals: Signals) -> Iterator[None]:
    """Makes the loop heed these signals, which some other process sends, in place of its own."""
    token = _GIVEN.set(signals)
    try:
        yield
    finally:
        _GIVEN.reset(token)


@contextmanager
def receive_signals() -> Iterator[Signals]:
    """Collects SIGINT, SIGTERM and SIGUSR1 instead of ending the process."""
    if (shared := _GIVEN.get()) is not None:
        yield shared
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
        for number, before in previous.items():
            signal.signal(number, before)
