"""The part of the machine's CPU and memory that this process may use, and whether it sees a GPU."""

import math
import os
from functools import cache
from pathlib import Path
from typing import Final

DEVICES: Final = Path("/dev")
_CGROUP: Final = Path("/sys/fs/cgroup")
_CPUINFO: Final = Path("/proc/cpuinfo")
_NO_LIMIT_BYTES: Final = 2**60  # cgroup v1 writes a higher value for no limit
_FEATURES: Final = (
    "AVX2",
    "AVX_VNNI",
    "AVX512F",
    "AVX512_BF16",
    "AVX512_VNNI",
    "AMX_BF16",
    "AMX_INT8",
)


def has_gpu(devices: Path = DEVICES) -> bool:
    """Returns whether a GPU's device file is visible, without importing torch."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()  # dxg: Linux on Windows


def available_cores() -> int:
    """Returns the cores of the process's CPU set (taskset, cpuset of a container), within its
    cgroup's CPU time.
    """
    quota = quota_cores()
    return min(cpuset_cores(), max(1, math.ceil(quota)) if quota else cpuset_cores())


def cpuset_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache  # each scan calls this, and reading the files can take longer than scanning a few centers
def quota_cores(cgroup: Path = _CGROUP) -> float | None:
    """Returns the CPU time per time that the cgroup allows (`docker run --cpus 1.5`), None without
    a limit. The result is cached per process.
    """
    try:
        if (cgroup / "cpu.max").is_file():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def memory_limit_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Returns the memory limit of the cgroup in bytes; None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((cgroup / name).read_text())
        except (OSError, ValueError):  # "max" is not a number
            continue
        return limit if limit < _NO_LIMIT_BYTES else None
    return None


def cpu_features(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Returns which of the instruction sets that decide an encoder's speed this CPU has."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next(
        (line.partition(":")[2].upper().split() for line in lines if line.startswith("flags")), []
    )
    return frozenset(_FEATURES).intersection(flags)
