"""The monitor of a training on Ray: what its driver and its first worker tell each other."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

from mlcd.errors import Conflict, MlcdError
from mlcd.progress import Meter, Stages
from mlcd.training.preemption import Signals

_NO_ROOM_S: Final = 60.0  # the time that workers have to begin; on a busy machine they need it
_PATIENCE: Final = 3  # times that the workers begin without coming further, before they give up
End = Literal["interrupted", "preempted"]


@dataclass(frozen=True)
class News:
    """The state of a training, as its driver sees it.

    attempt: how often the workers have begun. stage: its number, name and total. done: units of it.
    error: what the user is told. bug: the traceback of an error that no user can help. lost: the
    workers were lost over and over. ended: they were asked to end, and did so at `step`.
    """

    attempt: int = 0
    num_workers: int = 0
    stage: tuple[int, str, int | None] | None = None
    done: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    error: MlcdError | None = None
    bug: str | None = None
    is_final: bool = False
    lost: bool = False
    ended: bool = False
    step: int | None = None


class RunMonitor:
    """The actor, which lives as long as the driver."""

    def __init__(self) -> None:
        self._news = News()
        self._end: End | None = None
        self._earlier: MlcdError | None = None
        self._furthest = -1
        self._idle = 0

    def news(self) -> News:
        return self._news

    def end(self, how: End) -> None:
        """Asks the workers to save a checkpoint and to end."""
        self._end = how

    def begin(self, num_workers: int) -> bool:
        """Tells whether the workers may begin: not after a final error, and not if they were lost
        too often without coming further.
        """
        if self._news.is_final:
            return False
        self._earlier = self._news.error
        self._idle += 1
        if self._idle > _PATIENCE:
            self._news = replace(self._news, lost=True)
            return False
        self._news = replace(
            self._news,
            attempt=self._news.attempt + 1,
            num_workers=num_workers,
            error=None,
            bug=None,
        )
        return True

    def report(
        self, stage: str, total: int | None, done: int, facts: dict[str, Any], *, begins: bool
    ) -> End | None:
        """Takes in what the first worker does, and returns the wish to end."""
        stage_now = self._news.stage
        if begins or stage_now is None:
            stage_now = (0 if stage_now is None else stage_now[0] + 1, stage, total)
        if done > self._furthest:
            self._furthest, self._idle = done, 0
        self._news = replace(self._news, stage=stage_now, done=done, facts=facts)
        return self._end

    def fail(self, error: MlcdError, *, is_final: bool) -> bool:
        """Keeps the first error of an attempt; a final one is never replaced.

        Returns whether this one is final: a run that is locked twice in a row is somebody else's.
        """
        is_final |= isinstance(error, Conflict) and isinstance(self._earlier, Conflict)
        if self._news.error is None or (is_final and not self._news.is_final):
            self._news = replace(self._news, error=error, is_final=is_final)
        return is_final

    def fail_unexpectedly(self, trace: str) -> None:
        self._news = replace(self._news, bug=self._news.bug or trace)

    def met(self, step: int | None) -> None:
        """Notes that the wish to end was met at this step."""
        self._news = replace(self._news, ended=True, step=step)


class MonitoredStages:
    """The `Stages` of the first worker, whose progress its driver shows.

    The answer to a report arrives while the next steps are taken: nothing waits for the driver.
    """

    def __init__(self, ray: Any, monitor: Any, signals: Signals) -> None:
        self._ray, self._monitor, self._signals = ray, monitor, signals
        self._call: Any = None

    @contextmanager
    def stage(self, name: str, total: int | None, *, done: int = 0) -> Iterator[Meter]:
        self.send(name, total, begins=True, done=done, facts={})
        meter = MonitoredMeter(self, name, total, done)
        yield meter
        meter.flush()

    def is_free(self) -> bool:
        """Takes in the answer to the last report; tells whether it has come."""
        if self._call is None:
            return True
        if not self._ray.wait([self._call], timeout=0)[0]:
            return False
        end = self._ray.get(self._call)
        self._signals.interrupted = end == "interrupted"
        self._signals.preempted = end == "preempted"
        self._call = None
        return True

    def send(
        self, name: str, total: int | None, *, begins: bool, done: int, facts: dict[str, Any]
    ) -> None:
        self._call = self._monitor.report.remote(name, total, done, facts, begins=begins)


class MonitoredMeter:
    def __init__(self, stages: MonitoredStages, name: str, total: int | None, done: int) -> None:
        self._stages, self._name, self._total, self._done = stages, name, total, done
        self._facts: dict[str, Any] = {}

    def advance(self, num: int = 1, **facts: object) -> None:
        self._done += num
        self._facts = facts or self._facts
        if self._stages.is_free():
            self.flush()

    def flush(self) -> None:
        self._stages.send(self._name, self._total, begins=False, done=self._done, facts=self._facts)


class RunDisplay:
    """The progress of the workers, shown by the driver's own meters.

    room: the part of a node that a worker takes, for people.
    """

    def __init__(self, stages: Stages, announce: Callable[[str], None], room: str) -> None:
        self._stages, self._announce, self._room = stages, announce, room
        self._open = ExitStack()
        self._began: float | None = time.monotonic()
        self._attempt, self._num_workers = 0, 0
        self._stage, self._done = -1, 0
        self._meter: Meter | None = None
        self.trains = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def show(self, news: News) -> None:
        self._say_what_happened(news)
        if news.stage is None:
            return
        number, name, total = news.stage
        if number != self._stage:
            self._open.close()
            self._stage, self._done = number, news.done
            self._meter = self._open.enter_context(self._stages.stage(name, total, done=news.done))
            self.trains = name == "train"
        if self._meter is not None and news.done != self._done:
            self._meter.advance(news.done - self._done, **news.facts)
            self._done = news.done

    def _say_what_happened(self, news: News) -> None:
        grows = news.num_workers > self._num_workers
        if news.attempt:
            self._began = None
        elif self._began is not None and time.monotonic() - self._began > _NO_ROOM_S:
            self._began = None
            self._announce(
                f"no worker of {self._room} has begun yet; the cluster may lack room for it"
                " (`ray status`), and Ray keeps that of a killed driver for three minutes"
            )
        if news.attempt > max(1, self._attempt):
            why = "there is room for more workers" if grows else "a worker was lost"
            self._announce(f"{why}; {news.num_workers} go on from the last checkpoint")
        self._attempt, self._num_workers = news.attempt, news.num_workers
