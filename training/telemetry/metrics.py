"""The numbers of every logged step: metrics.jsonl always, TensorBoard's events where they are asked for.

Both are cut back to the checkpoint when a run resumes.
"""

import json
from pathlib import Path

from mlcd.artifacts.disk import write_synced
from mlcd.errors import ConfigInvalid

NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsLog:
    """Appends to a run's metrics; lines after `resume_step` are of a lost future and are dropped."""

    def __init__(self, directory: Path, resume_step: int) -> None:
        self._path = directory / NAME
        _cut_back(self._path, resume_step)

    def append(self, record: dict[str, object]) -> None:
        _append(self._path, record)


class KeysLog:
    """keys-RANK.jsonl: the keys of each step's samples of one process. First `cut_all`, on one process."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / f"keys-{rank}.jsonl"

    @staticmethod
    def cut_all(directory: Path, resume_step: int) -> None:
        """Drop the lines of a lost future; also of processes that are no more."""
        for path in directory.glob("keys-*.jsonl"):
            _cut_back(path, resume_step)

    def append(self, record: dict[str, object]) -> None:
        _append(self._path, record)


def _append(path: Path, record: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _cut_back(path: Path, resume_step: int) -> None:
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    # A crash can leave half a line at the end; another one, now, must not leave half a file.
    kept = [
        line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= resume_step
    ]
    write_synced(path, "".join(kept).encode())


class TensorBoardLog:
    """The same records as scalars, in `tensorboard/` of the run.

    Raises ConfigInvalid where the package tensorboard is not installed. Events after `resume_step` stay in the files;
    TensorBoard leaves them out.
    """

    def __init__(self, directory: Path, resume_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigInvalid(
                "telemetry.tensorboard=true needs the package tensorboard",
                remedy="pip install 'mlcd[tensorboard]', or leave it off: metrics.jsonl holds the same numbers",
            ) from error
        self._writer = SummaryWriter(str(directory / TENSORBOARD), purge_step=resume_step + 1)

    def append(self, record: dict[str, object]) -> None:
        """Every number of the record but its step; what is null has no value at this step."""
        step = record["step"]
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
