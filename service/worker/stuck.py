"""The case of a task that does not stop when it must: the process ends without it.

The caller first gives the task back to the queue; no half-written part is ever visible.
"""

import logging
import os
import sys
import threading
from typing import Final, NoReturn

from service.timings import WORKER_END_S

STALLED: Final = 1  # exit status after a task that hangs


def end(status: int = 0) -> NoReturn:
    """Ends the process, whatever its threads do."""
    logging.shutdown()
    os._exit(status)


def start_again() -> NoReturn:
    """Replaces the process by a new one of the same command line."""
    logging.shutdown()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command line


def last_resort() -> threading.Timer:
    """Returns a timer that ends the process some time after a signal, whatever hangs.

    A caller that goes on after `Worker.run` cancels it.
    """
    timer = threading.Timer(WORKER_END_S, os._exit, (1,))
    timer.daemon = True
    return timer
