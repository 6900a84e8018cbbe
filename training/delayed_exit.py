"""The exit of a process whose error is reported by another process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from mlcd.world import ReportedElsewhere

_EXIT_STATUS: Final = 2
_DELAY_S: Final = 2.0


@contextmanager
def delayed_exit() -> Iterator[None]:
    """Turns ReportedElsewhere into exit status 2, after a delay.

    torchrun stops all processes once one exits, so the process that reports the error must exit
    first.
    """
    try:
        yield
    except ReportedElsewhere:
        time.sleep(_DELAY_S)
        raise click.exceptions.Exit(_EXIT_STATUS) from None
