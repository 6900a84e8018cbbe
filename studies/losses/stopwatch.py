"""The time that a stage takes, over all the processes that worked on it one after the other."""

import json
import time
from pathlib import Path
from typing import Self


class Stopwatch:
    """Adds to the time of earlier processes in its file; that of a killed process is lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        before: tuple[float, float] = json.loads(path.read_text()) if path.is_file() else (0.0, 0.0)
        self.wall_s, self.cpu_s = before

    def __enter__(self) -> Self:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter() - self._wall
        self.cpu_s += time.process_time() - self._cpu
        written = self._path.with_suffix(".partial")
        written.write_text(json.dumps([self.wall_s, self.cpu_s]))
        written.rename(self._path)
