"""The loop of `mlcd worker`: performs tasks of jobs, one after the other, until a signal.

The computing thread performs the task, and stops between two images when requested. The main thread
calls the queue and handles signals: it renews the lease every second, and thereby learns of a
cancel. A task that does not stop in time, because the engine is computing a batch, is abandoned:
the process ends or restarts, and no half-written part is ever visible. A hanging task also ends the
process.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import FrameType
from typing import Final, NoReturn, TypeVar

from mlcd.backoff import Backoff
from mlcd.child import STOPS
from mlcd.errors import Unavailable
from mlcd.service.host.signals import StopSignals
from mlcd.service.jobs.job import MAX_ATTEMPTS, Work
from mlcd.service.jobs.queue import Queue
from mlcd.service.telemetry.logs import places
from mlcd.service.timings import (
    AFTER_FAILURE_S,
    ENGINE_AWAY_S,
    QUEUE_FIRST_WAIT_S,
    QUEUE_LONGEST_WAIT_S,
    QUEUE_SETTLED_S,
    RENEWAL_S,
    WORKER_DRAIN_S,
    WORKER_END_S,
    WORKER_IDLE_S,
    WORKER_POLL_S,
    WORKER_STOP_S,
)
from mlcd.service.worker.failures import (
    EngineDown,
    Stopped,
    describe_stall,
    is_fatal,
    is_misfit,
    line_of,
    problem_of,
    reason_of,
)
from mlcd.service.worker.skipped_jobs import ForeignJobs, LeftJobs
from mlcd.service.worker.task import Outcome, TaskRunner, Watch

_log = logging.getLogger("mlcd.jobs")
_STALLED: Final = 1  # exit status after a hanging task
_Answer = TypeVar("_Answer")


class RetryingQueue:
    """Calls a queue that may be unreachable, with backoff. Logs once when the queue becomes
    unreachable, and once when it is back.
    """

    def __init__(self) -> None:
        self.up = True
        self.wait_s = 0.0  # seconds before the next call, increasing while the queue is down

        self._backoff = Backoff(QUEUE_FIRST_WAIT_S, QUEUE_LONGEST_WAIT_S)
        self._last_failure_s: float | None = None  # None once the queue is back

    def once(self, call: Callable[[], _Answer]) -> _Answer | None:
        """Calls the queue; returns None if it is unreachable."""
        try:
            answer = call()
        except Unavailable as error:
            if self._last_failure_s is None:
                _log.warning("the job queue is unreachable, trying again: %s", error.message)
            self._last_failure_s = time.monotonic()
            self.up, self.wait_s = False, self._backoff.next_s()
            return None
        if (
            self._last_failure_s is not None
            and time.monotonic() - self._last_failure_s >= QUEUE_SETTLED_S
        ):
            _log.warning("the job queue is back")
            self._last_failure_s = None
            self._backoff.reset()
        self.up, self.wait_s = True, 0.0
        return answer


@dataclass
class _Task:
    """A running task. began_s: time of its start. stopped_s: time when it was told to stop."""

    work: Work
    watch: Watch
    future: "Future[Outcome]"
    began_s: float
    renewal_due_s: float
    stopped_s: float | None = None


class Worker:
    """A worker of one queue. `run` must be called from the main thread."""

    def __init__(
        self,
        queue: Queue,
        runner: TaskRunner,
        computing: ThreadPoolExecutor,
        *,
        name: str,
        lease_s: float,
        stall_s: float,
    ) -> None:
        """computing: pool of the one thread that opened the equipment of `runner`."""
        self._queue, self._runner, self._computing = queue, runner, computing
        self._name, self._lease_s, self._stall_s = name, lease_s, stall_s
        self._stopping, self._drains = False, False
        self._signals = StopSignals()
        self.exit_timer = _make_exit_timer()
        self._retrying = RetryingQueue()
        self._engine_up = True
        self._task: _Task | None = None
        self._beat_due_s = self._claim_due_s = 0.0
        self._left, self._foreign = LeftJobs(queue), ForeignJobs(queue, runner.fingerprint)

    def run(self, *, drain: bool) -> None:
        """Works until a signal, or with `drain` until no job of this model is left to do."""
        self._drains = drain
        for number in STOPS:
            signal.signal(number, self._handle_signal)
        try:
            self._run()
        finally:
            self._runner.forget()

    def _run(self) -> None:
        while self._task or not self._stopping:
            self._beat()
            if self._task is not None:
                self._poll(self._task)
            elif self._may_claim() and (work := self._retrying.once(self._claim)) is not None:
                self._start(work)
            elif self._drains and self._retrying.up and self._retrying.once(self._is_drained):
                return
            else:
                if self._foreign.is_look_due:
                    self._retrying.once(self._foreign.look)
                self._pause(max(WORKER_IDLE_S, self._retrying.wait_s))

    def _may_claim(self) -> bool:
        return not self._stopping and time.monotonic() >= self._claim_due_s

    def _delay_claims(self, seconds: float) -> None:
        """Starts no task for `seconds`."""
        self._claim_due_s = time.monotonic() + seconds

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal; a second signal ends the process immediately."""
        del frame
        if not self._signals.begins(number):
            return
        self._stopping = True
        self.exit_timer.start()

    def _claim(self) -> Work | None:
        self._left.drop_canceled()
        return self._queue.claim(
            self._name, [self._runner.fingerprint], lease_s=self._lease_s, exclude=self._left.ids
        )

    def _is_drained(self) -> bool:
        return not self._queue.pending([self._runner.fingerprint], exclude=self._left.ids)

    def _beat(self) -> None:
        """Reports regularly that this worker is alive."""
        if self._stopping or time.monotonic() < self._beat_due_s:
            return
        self._beat_due_s = time.monotonic() + self._lease_s / 3
        self._retrying.once(
            lambda: self._queue.heartbeat(
                self._name, self._runner.fingerprint, lease_s=self._lease_s
            )
        )

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < end_s:
            time.sleep(WORKER_POLL_S)

    def _start(self, work: Work) -> None:
        now_s = time.monotonic()
        watch = Watch(until_s=now_s + self._lease_s)
        future = self._computing.submit(self._runner.perform, work, watch)
        self._task = _Task(work, watch, future, now_s, now_s + RENEWAL_S)

    def _poll(self, task: _Task) -> None:
        """Checks the running task once, and reports it if it has ended."""
        wait([task.future], WORKER_POLL_S)
        if task.future.done():
            self._task = None
            self._settle(task)
        else:
            self._keep(task)

    def _settle(self, task: _Task) -> None:
        work, watch, error = task.work, task.watch, task.future.exception()
        if error is None:
            self._engine_up = True
            self._report(lambda: self._report_done(work, task.future.result()))
            facts = {"images": watch.done, "seconds": round(time.monotonic() - task.began_s, 3)}
            _log.info("%s done", _name(work), extra={"fields": {"job": work.job_id, **facts}})
        elif isinstance(error, Stopped):
            self._report(lambda: self._queue.release(work))
        elif isinstance(error, EngineDown):
            if self._engine_up:
                _log.warning("the engine cannot be used now; trying again")
            self._engine_up = False
            self._report(lambda: self._queue.release(work))
            self._delay_claims(ENGINE_AWAY_S)
        elif is_misfit(error):
            self._leave_to_others(work, error)
        else:
            assert isinstance(error, Exception)
            self._report_failed(work, error)

    def _keep(self, task: _Task) -> None:
        """Renews the lease of a task, and stops it if necessary. Ends the process if the task hangs
        or does not stop.
        """
        watch, now_s = task.watch, time.monotonic()
        if now_s >= task.renewal_due_s and not watch.stop and not self._stopping:
            task.renewal_due_s = now_s + max(RENEWAL_S, self._retrying.wait_s)
            self._renew(task.work, watch)
        watch.stop |= self._stopping or time.monotonic() > watch.until_s
        if watch.stop and task.stopped_s is None:
            task.stopped_s = time.monotonic()
        if task.stopped_s is not None and time.monotonic() - task.stopped_s > (
            WORKER_DRAIN_S if self._stopping else WORKER_STOP_S
        ):
            self._abandon(task.work)
        if not watch.stop and watch.stalls(self._stall_s):
            self._end_stalled(task.work, watch)

    def _renew(self, work: Work, watch: Watch) -> None:
        requested_s = time.monotonic()
        is_renewed = self._retrying.once(
            lambda: self._queue.renew(work, lease_s=self._lease_s, done=watch.done)
        )
        if is_renewed:
            watch.until_s = requested_s + self._lease_s
        elif is_renewed is False:  # not None, which means that the queue is unreachable
            watch.stop = True

    def _abandon(self, work: Work) -> None:
        self._retrying.once(lambda: self._queue.release(work))
        if self._stopping:
            _end_process()
        _restart_process()

    def _end_stalled(self, work: Work, watch: Watch) -> None:
        facts = {"job": work.job_id, "attempt": work.attempt, "images": watch.done}
        line = line_of(watch.thread)
        message = "%s hangs: no image was done for %g s (%s); the worker ends, restart it"
        _log.error(message, _name(work), self._stall_s, line, extra={"fields": facts})
        self._retrying.once(lambda: self._queue.fail(work, describe_stall(self._stall_s)))
        _end_process(_STALLED)

    def _leave_to_others(self, work: Work, error: BaseException) -> None:
        problem = problem_of(error)
        facts = {"job": work.job_id, "code": problem.code}
        _log.warning(
            "a job is left to other workers: %s: %s",
            problem.message,
            problem.remedy,
            extra={"fields": facts},
        )
        self._left.add(work)
        self._report(lambda: self._queue.refuse(work, problem))

    def _report(self, report: Callable[[], None]) -> None:
        """Reports to the queue, retrying until it succeeds: an unreported task is done again."""
        self._retrying.once(report)
        while not self._retrying.up and not self._stopping:
            self._pause(self._retrying.wait_s)
            self._retrying.once(report)

    def _report_done(self, work: Work, outcome: Outcome) -> None:
        if outcome.sizes is None:
            self._queue.complete(work, failed_items=outcome.failed_items)
        else:
            self._queue.finish_plan(work, outcome.sizes, damaged_files=outcome.damaged_files)

    def _report_failed(self, work: Work, error: Exception) -> None:
        problem = problem_of(error)
        facts = {"job": work.job_id, "attempt": work.attempt, "code": problem.code}
        _log.error(
            "%s failed: %s (%s)",
            _name(work),
            reason_of(error),
            places(error),
            extra={"fields": facts},
        )
        fatal = is_fatal(error, work.stage)
        if self._drains and work.stage == "discard" and work.attempt >= MAX_ATTEMPTS:
            self._left.add(work)  # otherwise draining would retry it forever
        self._report(lambda: self._queue.fail(work, problem, fatal=fatal))
        self._delay_claims(AFTER_FAILURE_S)


def _name(work: Work) -> str:
    """Returns the name of the task in log lines."""
    return work.stage if work.shard is None else f"shard {work.shard}"


def _end_process(status: int = 0) -> NoReturn:
    """Ends the process, whatever its threads do. The caller must first release the task."""
    logging.shutdown()
    os._exit(status)


def _restart_process() -> NoReturn:
    """Replaces the process by a new one with the same command line."""
    logging.shutdown()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command line


def _make_exit_timer() -> threading.Timer:
    """Returns a timer that ends the process WORKER_END_S after a signal, whatever hangs.

    A caller that continues after `Worker.run` must cancel it.
    """
    timer = threading.Timer(WORKER_END_S, os._exit, (1,))
    timer.daemon = True
    return timer
