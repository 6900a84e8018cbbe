"""The limit on open files of a process: each connection is one, each large upload another."""

import resource
from typing import Final

from mlcd.errors import ConfigInvalid

BACKLOG: Final = 2048  # most connections waiting to be accepted
_MIN_DESCRIPTORS: Final = 64
_ADVISED_DESCRIPTORS: Final = 4096
_MAX_DESCRIPTORS: Final = 65_536


def allow_descriptors() -> None:
    """Raises the process's soft limit on open files to its hard limit, at most 65,536.

    Raises ConfigInvalid if the hard limit is less than a server or a worker needs to start.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit == resource.RLIM_INFINITY:
        return
    if hard_limit < _MIN_DESCRIPTORS:
        raise ConfigInvalid(
            f"at least {_MIN_DESCRIPTORS} open files are required, and the limit is {hard_limit}",
            remedy=f"raise the limit with `ulimit -n {_ADVISED_DESCRIPTORS}`",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, _MAX_DESCRIPTORS), hard_limit))


def affordable(num: int) -> int:
    """Returns `num` connections, but at most half of the soft limit on open files."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return num if soft_limit == resource.RLIM_INFINITY else min(num, max(1, soft_limit // 2))
