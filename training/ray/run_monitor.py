"""The monitor of a training on Ray, through which its driver and rank 0 exchange messages."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

from mlcd.errors import Conflict, MlcdError
from mlcd.progress import Meter, Stages
from mlcd.training.preemption import Signals

_NO_ROOM_S: Final = 60.0  # warns if no worker has started; a busy machine takes this long
_MAX_IDLE_ATTEMPTS: Final = 3  # attempts in a row without progress
End = Literal["interrupted", "preempted"]


@dataclass(frozen=True)
class News:
    """The state of a training, as its driver sees it.

    attempt: number of times that the workers have started. stage: number, name and total of the
    current stage. done: finished units of the stage. error: error to show to the user. bug:
    traceback of an unexpected error. lost: the workers were lost repeatedly. ended: the workers
    stopped on request, at `step`.
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
    """The Ray actor with the state of the training; it lives as long as the driver."""

    def __init__(self) -> None:
        self._news = News()
        self._end: End | None = None
        self._previous_error: MlcdError | None = None
        self._furthest = -1
        self._idle_attempts = 0

    def news(self) -> News:
        return self._news

    def end(self, how: End) -> None:
        """Requests that the workers save a checkpoint and stop."""
        self._end = how

    def begin(self, num_workers: int) -> bool:
        """Starts an attempt and returns True; returns False after a final error, or after too many
        attempts without progress.
        """
        if self._news.is_final:
            return False
        self._previous_error = self._news.error
        self._idle_attempts += 1
        if self._idle_attempts > _MAX_IDLE_ATTEMPTS:
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
        self, stage: str, total: int | None, done: int, facts: dict[str, Any], *, is_new_stage: bool
    ) -> End | None:
        """Records the progress of rank 0, and returns a request to stop, if there is one."""
        current_stage = self._news.stage
        if is_new_stage or current_stage is None:
            current_stage = (0 if current_stage is None else current_stage[0] + 1, stage, total)
        if done > self._furthest:
            self._furthest, self._idle_attempts = done, 0
        self._news = replace(self._news, stage=current_stage, done=done, facts=facts)
        return self._end

    def fail(self, error: MlcdError, *, is_final: bool) -> bool:
        """Records the first error of an attempt, and replaces it only by a final error.

        Returns True if this error is final. A second Conflict in a row is final: the lock belongs
        to another run, not to a worker of the last attempt that is still stopping.
        """
        is_final |= isinstance(error, Conflict) and isinstance(self._previous_error, Conflict)
        if self._news.error is None or (is_final and not self._news.is_final):
            self._news = replace(self._news, error=error, is_final=is_final)
        return is_final

    def fail_unexpectedly(self, trace: str) -> None:
        self._news = replace(self._news, bug=self._news.bug or trace)

    def report_stop(self, step: int | None) -> None:
        """Records that the workers stopped on request at this step."""
        self._news = replace(self._news, ended=True, step=step)


class MonitoredStages:
    """The `Stages` of rank 0, whose progress the driver shows.

    Training does not wait for the answer to a report: it is read when a later step ends.
    """

    def __init__(self, ray: Any, monitor: Any, signals: Signals) -> None:
        self._ray, self._monitor, self._signals = ray, monitor, signals
        self._call: Any = None

    @contextmanager
    def stage(self, name: str, total: int | None, *, done: int = 0) -> Iterator[Meter]:
        self.send(name, total, is_new_stage=True, done=done, facts={})
        meter = MonitoredMeter(self, name, total, done)
        yield meter
        meter.flush()

    def is_free(self) -> bool:
        """Reads the answer to the last report; returns False if it has not arrived."""
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
        self, name: str, total: int | None, *, is_new_stage: bool, done: int, facts: dict[str, Any]
    ) -> None:
        self._call = self._monitor.report.remote(
            name, total, done, facts, is_new_stage=is_new_stage
        )


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
        self._stages.send(
            self._name, self._total, is_new_stage=False, done=self._done, facts=self._facts
        )


class RunDisplay:
    """Shows the progress of the workers with the driver's meters.

    room: the CPUs and GPUs that a worker needs, as text.
    """

    def __init__(self, stages: Stages, announce: Callable[[str], None], room: str) -> None:
        self._stages, self._announce, self._room = stages, announce, room
        self._open = ExitStack()
        self._waiting_since: float | None = time.monotonic()
        self._attempt, self._num_workers = 0, 0
        self._stage, self._done = -1, 0
        self._meter: Meter | None = None
        self.is_training = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def show(self, news: News) -> None:
        self._announce_changes(news)
        if news.stage is None:
            return
        number, name, total = news.stage
        if number != self._stage:
            self._open.close()
            self._stage, self._done = number, news.done
            self._meter = self._open.enter_context(self._stages.stage(name, total, done=news.done))
            self.is_training = name == "train"
        if self._meter is not None and news.done != self._done:
            self._meter.advance(news.done - self._done, **news.facts)
            self._done = news.done

    def _announce_changes(self, news: News) -> None:
        has_grown = news.num_workers > self._num_workers
        if news.attempt:
            self._waiting_since = None
        elif (
            self._waiting_since is not None and time.monotonic() - self._waiting_since > _NO_ROOM_S
        ):
            self._waiting_since = None
            self._announce(
                f"no worker of {self._room} has started yet; the cluster may lack room for it"
                " (`ray status`), and Ray reserves the room of a killed driver for three minutes"
            )
        if news.attempt > max(1, self._attempt):
            why = "there is room for more workers" if has_grown else "a worker was lost"
            self._announce(f"{why}; {news.num_workers} continue from the last checkpoint")
        self._attempt, self._num_workers = news.attempt, news.num_workers
