"""The memory of this machine and of processes."""

import os
from contextlib import suppress
from pathlib import Path

from mlcd.cores import memory_limit_bytes

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usable_memory_bytes() -> int:
    """Returns the memory of the machine, or the limit of the cgroup if that is lower."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    return min(machine_bytes, memory_limit_bytes() or machine_bytes)


def resident_bytes(pid: int | None) -> int:
    """Returns the resident memory of a process, 0 if it has ended or the system does not say."""
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0
