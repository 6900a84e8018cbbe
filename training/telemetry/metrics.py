"""metrics.jsonl: one line per logged step, cut back to the checkpoint when a run resumes."""

import json
from pathlib import Path

NAME = "metrics.jsonl"


class MetricsLog:
    """Appends to a run's metrics; lines after `resume_step` are of a lost future and are dropped."""

    def __init__(self, directory: Path, resume_step: int) -> None:
        self._path = directory / NAME
        kept = [line for line in self._lines() if json.loads(line)["step"] <= resume_step]
        self._path.write_text("".join(kept))

    def append(self, record: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _lines(self) -> list[str]:
        if not self._path.is_file():
            return []
        # A crash can leave half a line at the end.
        return [line for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
