"""The limit on open files of a process: a connection is one, and a large upload another."""

import resource
from typing import Final

BACKLOG: Final = 2048  # connections that wait to be accepted
_MAX_DESCRIPTORS: Final = 65_536


def allow_descriptors() -> None:
    """Raises the process's limit on open files to the most that the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _MAX_DESCRIPTORS), most))


def affordable(num: int) -> int:
    """Returns how many of `num` connections fit into half of the limit on open files."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return num if most == resource.RLIM_INFINITY else min(num, max(1, most // 2))
