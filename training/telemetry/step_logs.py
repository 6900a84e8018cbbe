"""The metrics of every logged step: metrics.jsonl always, TensorBoard's events on request.

When a run resumes, both are truncated to the steps up to its checkpoint.
"""

import json
from pathlib import Path
from typing import Any

from mlcd.artifacts.disk import write_synced
from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command

NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def read_losses(run: Path) -> list[dict[str, Any]]:
    """Returns the records of the run's metrics that have a loss, in the order of the steps."""
    records = (json.loads(line) for line in (run / NAME).read_text().splitlines())
    return [record for record in records if record.get("loss") is not None]


class MetricsLog:
    """Appends to a run's metrics.jsonl.

    Opening drops the lines after `resume_step`, whose steps are repeated.
    """

    def __init__(self, directory: Path, resume_step: int) -> None:
        self._path = directory / NAME
        _truncate(self._path, resume_step)

    def append(self, record: dict[str, object]) -> None:
        _append(self._path, record)


class KeysLog:
    """Appends the keys of one process's samples of each step to keys-RANK.jsonl.

    Call `truncate_all` first, on one process.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / f"keys-{rank}.jsonl"

    @staticmethod
    def truncate_all(directory: Path, resume_step: int) -> None:
        """Drops the lines after `resume_step` in the logs of all ranks, even if fewer run now."""
        for path in directory.glob("keys-*.jsonl"):
            _truncate(path, resume_step)

    def append(self, record: dict[str, object]) -> None:
        _append(self._path, record)


def _append(path: Path, record: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _truncate(path: Path, resume_step: int) -> None:
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    # A crash may have left half a line at the end. The file is replaced atomically.
    complete = [
        line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= resume_step
    ]
    write_synced(path, "".join(complete).encode())


class TensorBoardLog:
    """Writes the same records as scalars to the run's `tensorboard/`.

    Raises ConfigInvalid if the package tensorboard is not installed. Events after `resume_step`
    stay in the files, but TensorBoard does not show them.
    """

    def __init__(self, directory: Path, resume_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigInvalid(
                "telemetry.tensorboard=true requires the package tensorboard",
                remedy=f"{install_command('tensorboard')}, or leave it off: metrics.jsonl has the"
                " same numbers",
            ) from error
        self._writer = SummaryWriter(str(directory / TENSORBOARD), purge_step=resume_step + 1)

    def append(self, record: dict[str, object]) -> None:
        """Writes the record's numbers except the step; None means no value at this step."""
        step = record["step"]
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
