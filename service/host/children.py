"""The child processes of the service, which only their parent ends.

A signal to a whole process group or control group reaches parent and child at the same time. The
parent then has requests to finish, for which it needs its child. Therefore the child ignores the
signal, and the parent says when it ends.
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
    """Starts `python -m module` with our process id as the last argument.

    Its standard input and output are pipes. Call it from the event loop's thread: the child ends
    when that thread ends. descriptors: files that the child inherits.
    """
    # The child inherits the block: no signal ends it before it has said that it ignores them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # no module is imported from the working directory, which is the user's
            "-m",
            module,
            *map(str, arguments),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            process_group=0,  # signals of a terminal reach only the parent
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def heed_parent_alone(parent: int, *, at_its_end: signal.Signals) -> None:
    """Ignores all stop signals but the parent's; call it first in the child.

    at_its_end: the signal that the system sends when the parent is killed.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, at_its_end)
    if os.getppid() != parent:  # it died before prctl
        sys.exit(1)
