"""The end of a process whose error another process reports."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from mlcd.world import Elsewhere

_FAILED: Final = 2
_LAST_WORD_S: Final = 2.0


@contextmanager
def leaving_the_last_word() -> Iterator[None]:
    """Ends the command with exit status 2, a moment after the process that reports the error.

    torchrun stops all processes once one has ended: the one with the report has to be the first.
    """
    try:
        yield
    except Elsewhere:
        time.sleep(_LAST_WORD_S)
        raise click.exceptions.Exit(_FAILED) from None
