"""The talk of the driver and the first worker of a training on Ray, without Ray."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mlcd.errors import Conflict, InvalidInput, Unavailable
from mlcd.training.preemption import Signals
from mlcd.training.ray import run_monitor
from mlcd.training.ray.run_monitor import MonitoredStages, News, RunDisplay, RunMonitor


def test_workers_begin_again_as_long_as_they_come_further():
    monitor = RunMonitor()
    for reached in range(20):
        assert monitor.begin(2)
        monitor.report("train", 100, reached, {}, is_new_stage=True)
    assert monitor.news().attempt == 20
    for num_workers in (2, 2, 1):
        assert monitor.begin(num_workers)
    assert not monitor.begin(1)
    assert monitor.news().lost
    assert monitor.news().num_workers == 1


def test_a_step_that_was_reached_before_is_not_further():
    monitor = RunMonitor()
    tries = 0
    while monitor.begin(2):
        tries += 1
        for step in (0, 3, 7):
            monitor.report("train", 100, step, {}, is_new_stage=step == 0)
    assert tries == 1 + 3


def test_a_final_error_stays_and_ends_it():
    monitor = RunMonitor()
    assert monitor.begin(2)
    monitor.fail(Unavailable("a process is gone"), is_final=False)
    assert monitor.begin(1)
    assert monitor.news().error is None
    assert not monitor.fail(Conflict("somebody is at it"), is_final=False)
    assert monitor.fail(InvalidInput("bad"), is_final=True)
    monitor.fail(InvalidInput("worse"), is_final=True)
    assert str(monitor.news().error) == "bad"
    assert not monitor.begin(2)


def test_a_lock_may_be_that_of_a_worker_that_ends_but_only_once():
    monitor, locked = RunMonitor(), Conflict("another process is writing run")
    assert monitor.begin(2)
    assert not monitor.fail(locked, is_final=False)
    assert monitor.begin(2)
    assert monitor.fail(locked, is_final=False)
    assert not monitor.begin(2)
    assert monitor.news().error is locked


class Later:
    """An actor whose answers come when they are let."""

    def __init__(self, monitor):
        self.calls, self.arrived = 0, set()
        self.report = SimpleNamespace(remote=self._report)
        self._monitor = monitor

    def _report(self, *given, **named):
        self.calls += 1
        self.answer = self._monitor.report(*given, **named)
        return self.calls

    def wait(self, tasks, timeout):
        assert timeout == 0
        return ([tasks[0]], []) if tasks[0] in self.arrived else ([], tasks)

    def get(self, task):
        assert task in self.arrived
        return self.answer


def test_reports_never_wait_and_bring_the_wish_to_end():
    monitor, signals = RunMonitor(), Signals()
    ray = Later(monitor)
    with MonitoredStages(ray, ray, signals).stage("train", 10, done=4) as meter:
        assert monitor.news().stage == (0, "train", 10)
        assert monitor.news().done == 4
        meter.advance(1, loss=2.0)
        assert ray.calls == 1  # its answer is not there yet
        ray.arrived.add(1)
        meter.advance(1)
        assert ray.calls == 2
        assert (monitor.news().done, monitor.news().facts) == (6, {"loss": 2.0})
        monitor.end("preempted")
        ray.arrived.add(2)
        meter.advance(1)
        assert not signals.preempted
        ray.arrived.add(3)
        meter.advance(1)
        assert (signals.preempted, signals.interrupted) == (True, False)
        meter.advance(1)
    assert monitor.news().done == 9  # the last report of a stage is always sent


class Shown:
    def __init__(self):
        self.events = []

    @contextmanager
    def stage(self, name, total, *, done=0):
        self.events.append((name, total, done))
        yield SimpleNamespace(advance=lambda num, **facts: self.events.append((num, facts)))
        self.events.append("end")


def test_the_driver_shows_what_was_lost_and_goes_back_to_where_it_goes_on():
    shown, said = Shown(), []
    with RunDisplay(shown, said.append, "1 CPUs") as display:
        display.show(News())
        display.show(News(attempt=1, num_workers=2, stage=(0, "train", 9), done=0))
        assert display.is_training
        display.show(News(attempt=1, num_workers=2, stage=(0, "train", 9), done=5, facts={"a": 1}))
        display.show(News(attempt=2, num_workers=1, stage=(0, "train", 9), done=5))
        display.show(News(attempt=2, num_workers=1, stage=(1, "train", 9), done=3))
        display.show(News(attempt=3, num_workers=2, stage=(1, "train", 9), done=3))
    assert shown.events == [("train", 9, 0), (5, {"a": 1}), "end", ("train", 9, 3), "end"]
    assert said == [
        "a worker was lost; 1 continue from the last checkpoint",
        "there is room for more workers; 2 continue from the last checkpoint",
    ]


@pytest.mark.parametrize("late", [True, False])
def test_a_cluster_without_room_is_said_once(late, monkeypatch):
    said = []
    display = RunDisplay(Shown(), said.append, "1 CPUs and 4 GPUs")
    if late:
        monkeypatch.setattr(run_monitor, "_NO_ROOM_S", 0)
    display.show(News())
    display.show(News())
    assert len(said) == late
    assert all("no worker of 1 CPUs and 4 GPUs has started yet" in line for line in said)
