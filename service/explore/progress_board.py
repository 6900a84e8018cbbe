"""How far an exploration is, as the page shows it."""

import threading
import time
from dataclasses import dataclass, replace
from typing import Literal

ExplorationStage = Literal["list", "embed", "cluster", "name", "label", "done", "failed"]


@dataclass(frozen=True)
class ExplorationProgress:
    """One moment of an exploration.

    done, total: of the present stage; total is None where it is unknown. pictures: in the
    collection. skipped: files that cannot be used. clusters: the number of the present centers, and
    `considered` those that it was chosen from. newest: the pictures taken in last, each with the
    version of its thumbnail. error: why it stopped, with the remedy.
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
        self._changing = threading.Lock()
        self._now = ExplorationProgress()
        self._began_s, self._began_at = time.monotonic(), 0

    @property
    def now(self) -> ExplorationProgress:
        return self._now

    def begin(self, stage: ExplorationStage, total: int | None = None) -> None:
        with self._changing:
            self._began_s, self._began_at = time.monotonic(), 0
            self._now = replace(self._now, stage=stage, done=0, total=total, seconds_left=None)

    def advance(self, done: int) -> None:
        """Reports that so many of the present stage are done."""
        with self._changing:
            self._now = replace(self._now, done=done, seconds_left=self._estimate_left(done))

    def show(self, **facts: object) -> None:
        with self._changing:
            self._now = replace(self._now, **facts)  # type: ignore[arg-type]

    def _estimate_left(self, done: int) -> float | None:
        total, spent_s = self._now.total, time.monotonic() - self._began_s
        return None if not done or total is None else spent_s / done * (total - done)
