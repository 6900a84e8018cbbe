"""Examines this machine and the choice of an engine; missing parts are reported, not errors."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from mlcd.cores import available_cores, cpu_features, cpuset_cores, quota_cores
from mlcd.encoders import choose_engine
from mlcd.export.starter.packages import is_installed as starter_installed
from mlcd.extras import install_command
from mlcd.version import __version__

_ENGINES: Final = (
    *("openvino", "torch", "onnxruntime", "faiss-cpu", "faiss-gpu-cuvs", "tritonclient"),
)
_CPUINFO: Final = Path("/proc/cpuinfo")
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES: Final = 2**60  # cgroup v1 writes a higher value for no limit
_NVIDIA_SMI: Final = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,compute_cap,driver_version",
    "--format=csv,noheader",
)
_TIMEOUT_S: Final = 10
_INT8: Final = {
    True: "available on request, for models made by `mlcd quantize`",
    False: "not available: the CPU has neither VNNI nor AMX",
    None: "unknown",
}


def examine() -> dict[str, Any]:
    """Returns the facts, ready for JSON; None for facts that cannot be determined."""
    return {
        "mlcd": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _find_version(name) for name in _ENGINES},
        "cpu": {
            "model": _read_cpu_model(),
            "features": sorted(cpu_features()),
            "openvino_capabilities": _openvino_capabilities(),
            "int8": _find_int8(),
        },
        "cores": {
            "machine": os.cpu_count(),
            "cpuset": cpuset_cores(),
            "cgroup_quota": quota_cores(),
            "usable": available_cores(),
        },
        "memory": {
            "machine_bytes": _read_memory_bytes(),
            "cgroup_limit_bytes": memory_limit_bytes(),
        },
        "gpus": _list_gpus(),
        "choice": _describe_choice(),
        "starter": starter_installed(),
    }


def report(facts: dict[str, Any]) -> str:
    """Returns the facts as text, one per line."""
    cpu, cores, memory, choice = facts["cpu"], facts["cores"], facts["memory"], facts["choice"]
    quota, limit = cores["cgroup_quota"], memory["cgroup_limit_bytes"]
    limit_text = _format_gib(limit) if limit else "none"
    rows = [
        ("mlcd", f"{facts['mlcd']}, Python {facts['python']}, {facts['system']}"),
        *((name, version or "not installed") for name, version in facts["packages"].items()),
        ("CPU", cpu["model"] or "unknown"),
        ("instructions", ", ".join(cpu["features"]) or "none that mlcd uses"),
        ("OpenVINO", ", ".join(cpu["openvino_capabilities"] or ["unknown"])),
        ("int8", _INT8[cpu["int8"]]),
        (
            "cores",
            (
                f"{cores['usable']} usable of {cores['machine']}; "
                f"cpuset {cores['cpuset']}, quota {quota or 'none'}"
            ),
        ),
        (
            "memory",
            f"{_format_gib(memory['machine_bytes'])}; limit {limit_text}",
        ),
        ("GPUs", "; ".join(facts["gpus"]) or "none"),
        (
            "choice",
            f"engine {choice['engine']}, precision {choice['precision']}: {choice['reason']}",
        ),
        (
            "starter",
            "installed" if facts["starter"] else f"not installed: {install_command('starter')}",
        ),
    ]
    return "\n".join(f"{name:<13} {text}" for name, text in rows)


def memory_limit_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Returns the memory limit of the cgroup in bytes; None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((cgroup / name).read_text())
        except (OSError, ValueError):  # "max" is not a number
            continue
        return limit if limit < _NO_LIMIT_BYTES else None
    return None


def _describe_choice() -> dict[str, str]:
    chosen = choose_engine()
    reason = (
        f"{chosen.reason}; fp32 is exact, and bf16 is used only on request"
        f"{_describe_bf16(chosen.engine)}"
    )
    return {"engine": chosen.engine, "precision": "fp32", "reason": reason}


def _describe_bf16(engine: str) -> str:
    capabilities = _openvino_capabilities()
    if engine != "openvino" or capabilities is None:
        return ""
    return (
        ", which this CPU can compute"
        if "BF16" in capabilities
        else ", which this CPU cannot compute"
    )


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read_cpu_model() -> str | None:
    return _read_field(_CPUINFO, "model name") or platform.processor() or None


def _read_memory_bytes() -> int | None:
    total = _read_field(_MEMINFO, "MemTotal")
    return 1024 * int(total.split()[0]) if total else None


def _read_field(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _openvino_capabilities() -> list[str] | None:
    try:
        from mlcd.encoders.openvino import capabilities

        return capabilities()
    except (ImportError, RuntimeError):
        return None


def _find_int8() -> bool | None:
    try:
        from mlcd.encoders.openvino import computes_int8

        return computes_int8()
    except (ImportError, RuntimeError):
        return None


def _list_gpus() -> list[str]:
    try:
        completed = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in completed.stdout.splitlines() if line.strip()]


def _format_gib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"
