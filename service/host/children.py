"""Processes that a process of the service starts, and ends: nobody else's signal does.

A signal to a whole group or control group reaches parent and child at one time. The parent has requests to finish then,
for which it needs its child: it alone says when the child ends.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from service.host.signals import STOPS

_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>


async def start_child(
    module: str, *arguments: object, descriptors: Sequence[int]
) -> asyncio.subprocess.Process:
    """`python -m module`, whose last argument is our process id; its standard input and output are pipes.

    descriptors: files that it takes over. To be called from the event loop's thread, with which the child ends.
    """
    # Handed down: they wait, so that none ends the child before it has said that it ignores them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the working directory is the user's: nothing in it is a module of ours
            "-m",
            module,
            *map(str, arguments),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            process_group=0,  # what else a terminal sends is for us
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def heed_parent_alone(parent: int, *, at_its_end: signal.Signals) -> None:
    """In the child, first of all. at_its_end: the signal that comes where the parent is killed, whatever we are at."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, at_its_end)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)
