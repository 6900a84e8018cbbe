"""How many CPU cores this process may use."""

import os


def available_cores() -> int:
    """Cores of the process's own CPU set (taskset, cpuset of a container), not of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
