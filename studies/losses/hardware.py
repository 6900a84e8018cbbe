"""The origin of a result: machine, versions, commit."""

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from mlcd.cores import available_cores

THEN: Final = " then "
_REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCES = ("mlcd", "training", "studies/losses")


@dataclass(frozen=True)
class Origin:
    """The origin of a run.

    instructions: those that torch chose on this CPU, such as AVX2; sums in another order may change
    last bits. commit ends in `+` if the sources that decide results differ from it. A run that went
    on at another commit has both, see THEN.
    """

    cpu: str
    instructions: str
    cores: int
    device: str
    torch: str
    python: str
    commit: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def origin() -> Origin:
    return Origin(
        _cpu(),
        torch.backends.cpu.get_cpu_capability(),
        available_cores(),
        _device(),
        torch.__version__,
        platform.python_version(),
        _commit(),
    )


def origin_so_far(path: Path) -> Origin:
    """Returns the origin of a run that begins or goes on, kept in the file from its process's
    start.
    """
    now = origin()
    if path.is_file():
        commits = json.loads(path.read_text())["commit"]
        now = replace(
            now, commit=commits if commits.endswith(now.commit) else f"{commits}{THEN}{now.commit}"
        )
    written = path.with_suffix(".partial")
    written.write_text(json.dumps(now.to_dict()))
    written.rename(path)
    return now


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def _commit() -> str:
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+" if _git("status", "--porcelain", "--", *_SOURCES) else "")


def _git(*words: str) -> str | None:
    finished = subprocess.run(
        ["git", *words], cwd=_REPOSITORY, capture_output=True, text=True, check=False
    )
    return finished.stdout.strip() if finished.returncode == 0 else None
