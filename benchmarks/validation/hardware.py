"""Where and from what a result comes: machine, versions, commit."""

import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mlcd.cores import available_cores

_REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCES = ("mlcd", "training", "benchmarks/validation")


@dataclass(frozen=True)
class Origin:
    """commit ends in `+` where the sources that decide results differ from it."""

    cpu: str
    cores: int
    device: str
    torch: str
    python: str
    commit: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def origin() -> Origin:
    return Origin(_cpu(), available_cores(), _device(), torch.__version__, platform.python_version(), _commit())


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+" if _git("status", "--porcelain", "--", *_SOURCES) else "")


def _git(*words: str) -> str | None:
    finished = subprocess.run(["git", *words], cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    return finished.stdout.strip() if finished.returncode == 0 else None
