"""The limit on open files of a process: a connection is one, and a large upload another."""

import resource
from typing import Final

from mlcd.errors import ConfigInvalid

BACKLOG: Final = 2048  # connections that wait to be accepted
_LEAST_DESCRIPTORS: Final = 64
_ADVISED_DESCRIPTORS: Final = 4096
_MAX_DESCRIPTORS: Final = 65_536


def allow_descriptors() -> None:
    """Raises the process's limit on open files to the most that the system allows.

    Raises ConfigInvalid where that is less than a server or a worker needs to start.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return
    if most < _LEAST_DESCRIPTORS:
        raise ConfigInvalid(
            f"at least {_LEAST_DESCRIPTORS} open files are required, and the limit is {most}",
            remedy=f"raise it with `ulimit -n {_ADVISED_DESCRIPTORS}`",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _MAX_DESCRIPTORS), most))


def affordable(num: int) -> int:
    """Returns how many of `num` connections fit into half of the limit on open files."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return num if most == resource.RLIM_INFINITY else min(num, max(1, most // 2))
