"""The checkpoints of a run: which stay, and what a fault or a kill while one is written costs."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from mlcd.artifacts.manifest import open_artifact
from mlcd.errors import ArtifactInvalid, InvalidInput, Unavailable
from mlcd.models.runs import checkpoint_steps, find_checkpoint
from mlcd.training.checkpoint.checkpoint_store import CheckpointStore
from mlcd.training.evaluation.while_training import open_evaluation
from mlcd.training.preemption import Preempted
from mlcd.training.run.run_training import run_training
from tests.unit.training.running import SILENT, before_step, saved_bytes


def test_which_checkpoints_stay(config):
    run = run_training(
        config(
            "run", "checkpoint.every_steps=3", "checkpoint.keep_last=2", "checkpoint.keep_every=9"
        ),
        SILENT,
    )
    steps = sorted(
        int(path.name.removeprefix("step_")) for path in (run.path / "checkpoints").iterdir()
    )
    assert steps == [0, 9, 18, 27, 30]


def test_a_kill_before_old_checkpoints_are_deleted_leaves_none(config, monkeypatch):
    options = ("checkpoint.every_steps=10", "checkpoint.keep_last=1", "checkpoint.keep_every=7")

    def killed(self, newest):
        if newest == 30:
            raise ConnectionError

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "_retire", killed)
        with pytest.raises(ConnectionError):
            run_training(config("run", *options), SILENT)
    run = run_training(config("run", *options), SILENT)
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == [
        "step_000000", "step_000030",
    ]  # fmt: skip


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_an_unwritable_checkpoint_stops_the_run_and_the_last_one_stays(
    config, monkeypatch, asynchronous
):
    """A library reports a full disk in this way."""
    from mlcd.training.checkpoint import checkpoint_store

    original = checkpoint_store.write_tensors

    def full(tensors, directory, group):
        if "step_000020" in str(directory):
            raise RuntimeError("I/O error: No space left on device (os error 28)")
        original(tensors, directory, group)

    recipe = config("run", f"checkpoint.asynchronous={asynchronous}")
    monkeypatch.setattr(checkpoint_store, "write_tensors", full)
    with pytest.raises(Unavailable, match=r"the disk is full while writing .*step_000020"):
        run_training(recipe, SILENT)
    monkeypatch.undo()
    folder = recipe.out + ".partial"
    assert open_artifact(Path(folder) / "checkpoints" / "step_000010").kind == "checkpoint"
    assert run_training(recipe, SILENT).digest == run_training(recipe, SILENT).digest


def test_training_goes_on_while_a_checkpoint_of_the_state_before_is_written(config, monkeypatch):
    from mlcd.training.checkpoint import checkpoint_store

    original, reached = checkpoint_store.write_tensors, threading.Event()

    def slow(tensors, directory, group):
        if "step_000010" in str(directory):
            assert reached.wait(60)
        original(tensors, directory, group)

    monkeypatch.setattr(checkpoint_store, "write_tensors", slow)
    before_step(monkeypatch, 15, lambda _: reached.set())
    overlapped = run_training(config("run", "checkpoint.keep_last=3"), SILENT)
    monkeypatch.undo()
    plain = run_training(
        config("plain", "checkpoint.keep_last=3", "checkpoint.asynchronous=false"), SILENT
    )
    for step in (10, 20, 30):
        assert saved_bytes(overlapped, step) == saved_bytes(plain, step), step


def test_a_crash_just_before_the_rename_leaves_no_checkpoint(config):
    recipe = config("run", "schedule.steps=5")
    finished = run_training(recipe, SILENT).path / "checkpoints" / "step_000005"
    half = finished.with_name("step_000007.partial")
    shutil.copytree(finished, half)
    assert find_checkpoint(finished.parents[1]) == finished
    assert checkpoint_steps(finished.parent) == [0, 5]


def test_a_checkpoint_of_a_newer_layout_is_refused(config, monkeypatch):
    from mlcd.training.checkpoint import checkpoint_store

    recipe = config("run")
    before_step(monkeypatch, 12, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(checkpoint_store, "LAYOUT", 99)
    with pytest.raises(Preempted):
        run_training(recipe, SILENT)
    monkeypatch.undo()
    with pytest.raises(
        ArtifactInvalid, match=r"step_000014 is a checkpoint of layout 99.*upgrade mlcd"
    ):
        run_training(recipe, SILENT)


def test_what_fails_later_costs_no_saved_step(config):
    """An evaluation's images that are away for a moment; before the first saved step nothing is
    worth keeping.
    """
    recipe = config("run", "evaluation.every_steps=12")
    assert recipe.checkpoint.every_steps == 10
    partial = Path(recipe.out + ".partial")

    def refuse(*_args, **_options):
        raise InvalidInput("no image can be decoded")

    def open_refusing(*_args):
        return refuse

    for every_steps, kept in ((4, False), (12, True)):
        early = config("run", f"evaluation.every_steps={every_steps}")
        with pytest.raises(InvalidInput, match="can be decoded"):
            run_training(early, SILENT, open_evaluation=open_refusing)
        assert partial.exists() is kept
    assert checkpoint_steps(partial / "checkpoints")[-1] == 10
    run = run_training(recipe, SILENT, open_evaluation=open_evaluation)
    assert run.summary["final"]["step"] == 30
