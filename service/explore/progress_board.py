"""The progress of an exploration, as the page shows it."""

import threading
import time
from dataclasses import dataclass, replace
from typing import Literal

ExplorationStage = Literal["list", "embed", "cluster", "name", "label", "done", "failed"]


@dataclass(frozen=True)
class ExplorationProgress:
    """The progress at one moment.

    done, total: items of the present stage; total is None if unknown. pictures: number of pictures
    in the collection. skipped: number of unusable files. clusters: number of present centers.
    considered: numbers of clusters that were compared. newest: keys of the latest added pictures,
    each with the version of its thumbnail. error: why the exploration stopped, with the remedy.
    """

    stage: ExplorationStage = "list"
    done: int = 0
    total: int | None = None
    seconds_left: float | None = None
    pictures: int = 0
    skipped: int = 0
    clusters: int | None = None
    considered: tuple[int, ...] = ()
    newest: tuple[tuple[str, str | None], ...] = ()
    error: str | None = None


class ProgressBoard:
    """The present progress. Any thread may write and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = ExplorationProgress()
        self._stage_start_s = time.monotonic()

    @property
    def now(self) -> ExplorationProgress:
        return self._now

    def begin(self, stage: ExplorationStage, total: int | None = None) -> None:
        with self._lock:
            self._stage_start_s = time.monotonic()
            self._now = replace(self._now, stage=stage, done=0, total=total, seconds_left=None)

    def advance(self, done: int) -> None:
        """Reports the number of finished items of the present stage."""
        with self._lock:
            self._now = replace(self._now, done=done, seconds_left=self._estimate_left(done))

    def show(self, **facts: object) -> None:
        with self._lock:
            self._now = replace(self._now, **facts)  # type: ignore[arg-type]

    def _estimate_left(self, done: int) -> float | None:
        total, spent_s = self._now.total, time.monotonic() - self._stage_start_s
        return None if not done or total is None else spent_s / done * (total - done)
