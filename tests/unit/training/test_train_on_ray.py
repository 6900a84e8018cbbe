"""Training on Ray, as far as it needs none; tests/e2e/test_train_on_ray.py has the clusters."""

import os
import signal
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    Conflict,
    Diverged,
    InvalidInput,
    Unavailable,
)
from mlcd.extras import install_command
from mlcd.pipelines.ray.session import RayOptions
from mlcd.training.config import load_config
from mlcd.training.pairs.pairs_config import load_any_config, validate_any
from mlcd.training.preemption import Signals, receive_signals, use_signals
from mlcd.training.ray import train_on_ray as module
from mlcd.training.ray.run_monitor import News, RunMonitor
from tests.conftest import call_mlcd, refuse

PLACES = ("data.images=photos/*.tar", "data.labels=work/labels", "out=work/run")


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (
            "auto",
            RayOptions(gpus=0.5),
            "--gpus must be 0 or 1 for training, got 0.5: give --gpus 1 or 0",
        ),
        ("auto", RayOptions(gpus=2), "--gpus must be 0 or 1 for training, got 2"),
        ("cuda", RayOptions(), "device=cuda requires workers with a GPU: give --gpus 1"),
        ("cpu", RayOptions(gpus=1), "device=cpu leaves the workers' GPUs idle"),
    ],
)
def test_processes_without_a_gpu_of_their_own_are_refused(device, options, message, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda _: True)
    with pytest.raises(ConfigInvalid, match=message):
        module._check(load_config("small", [*PLACES, f"device={device}"]), options)


def test_a_package_that_ray_needs_for_training_is_named(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "pandas" else True)
    with pytest.raises(ConfigInvalid, match=r"requires the package pandas: pip install .*\[ray\]'"):
        module._check(load_config("small", PLACES), RayOptions())


def test_every_place_is_as_other_machines_find_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("small", [*PLACES, "data.selection=s3://bucket/kept"])
    fields = module._make_absolute(config)
    assert fields["out"] == f"{tmp_path}/work/run"
    assert fields["data"]["images"] == f"{tmp_path}/photos/*.tar"
    assert fields["data"]["labels"] == f"{tmp_path}/work/labels"
    assert fields["data"]["selection"] == "s3://bucket/kept"
    assert validate_any(fields).identity() == config.identity()  # a run goes on with or without Ray
    mix = "data.mix=[{images: a, labels: b}, {images: /c, labels: d}]"
    mixed = module._make_absolute(load_config("small", [mix, "out=run"]))
    assert [source["images"] for source in mixed["data"]["mix"]] == [f"{tmp_path}/a", "/c"]


def test_missing_labels_are_named_before_ray_is_asked(tmp_path):
    config = load_config("small", ["data.images=x", f"data.labels={tmp_path}/no", "out=run"])
    with pytest.raises(ArtifactInvalid, match=f"{tmp_path}/no is not a finished artifact"):
        module._check_artifacts(module._make_absolute(config))


def test_places_of_pairs_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = module._make_absolute(load_any_config("clip", ["data.pairs=pairs", "out=run"]))
    assert fields["data"]["pairs"] == f"{tmp_path}/pairs"
    assert validate_any(fields).out == f"{tmp_path}/run"


def test_the_marker_is_beside_the_run_and_goes(tmp_path):
    with module._create_marker(tmp_path / "folder" / "run") as marker:
        assert marker.exists()
        assert marker.parent == tmp_path / "folder"
    assert not list((tmp_path / "folder").iterdir())
    (tmp_path / "file").touch()
    with (
        pytest.raises(InvalidInput, match="cannot be created"),
        module._create_marker(tmp_path / "file" / "run"),
    ):
        pass


@pytest.mark.parametrize(
    ("news", "kind", "message"),
    [
        (News(error=Diverged("step 3"), is_final=True), Diverged, "step 3"),
        (News(error=Conflict("somebody is at it"), is_final=True), Conflict, "somebody is at it"),
        (
            News(error=Unavailable("process 1 is gone"), lost=True, done=7),
            Unavailable,
            r"over and over, the last time after 7 steps \(process 1 is gone\)",
        ),
        (News(lost=True), Unavailable, "over and over"),
        (News(bug="Traceback: ValueError", lost=True), RuntimeError, "ValueError"),
    ],
)
def test_what_the_workers_met_is_raised(news, kind, message):
    with pytest.raises(kind, match=message):
        module._raise_outcome(news)


LOCKED = Conflict("another process is writing run")
LOCKED.__cause__ = BlockingIOError()


@pytest.mark.parametrize(
    ("error", "begins_again"),
    [
        (Unavailable("process 1 is gone"), True),
        (LOCKED, True),
        (Conflict("made from other settings"), False),
        (InvalidInput("no labels"), False),
    ],
)
def test_only_a_lost_worker_or_a_lock_makes_ray_begin_again(
    error, begins_again, tmp_path, monkeypatch
):
    def run(work, stages):
        raise error

    monitor = RunMonitor()
    calls = {name: SimpleNamespace(remote=getattr(monitor, name)) for name in ("begin", "fail")}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda answer: answer))
    monkeypatch.setattr(module, "_run", run)
    work = module._Work({}, 1, str(tmp_path), SimpleNamespace(**calls, report=None), None)
    with pytest.raises(type(error)) if begins_again else nullcontext():
        module._train_worker({"work": work})
    assert monitor.news().error is error
    assert monitor.news().is_final != begins_again


@pytest.mark.parametrize(
    ("error", "begins_again"),
    [(Unavailable("process 1 is gone"), True), (Diverged("step 3"), False)],
)
def test_only_an_error_that_passes_makes_ray_begin_again(
    error, begins_again, tmp_path, monkeypatch
):
    def run(work, stages):
        raise error

    monitor = RunMonitor()
    calls = {name: SimpleNamespace(remote=getattr(monitor, name)) for name in ("begin", "fail")}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda answer: answer))
    monkeypatch.setattr(module, "_run", run)
    work = module._Work({}, 1, str(tmp_path), SimpleNamespace(**calls, report=None), None)
    with pytest.raises(type(error)) if begins_again else nullcontext():
        module._train_worker({"work": work})
    assert monitor.news().error is error
    assert monitor.news().is_final != begins_again


def test_the_loop_heeds_the_signals_that_it_is_given():
    given = Signals()
    with use_signals(given), receive_signals() as received:
        assert received is given
    with receive_signals() as own:
        assert own is not given
        os.kill(os.getpid(), signal.SIGUSR1)
        assert own.preempted


@pytest.mark.parametrize(
    "option", [("--plan",), ("--rounds", 2), ("--resume", "R", "--replay", "B")]
)
def test_what_is_for_one_process_is_refused(option, monkeypatch):
    monkeypatch.setattr("mlcd.commands.common_options.require_ray", lambda: None)
    refuse(
        "train small --on ray",
        *option,
        contains="--on ray does not support --plan, --rounds or --replay",
    )


def test_torchrun_and_ray_exclude_each_other(monkeypatch):
    monkeypatch.setattr("mlcd.commands.common_options.require_ray", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse("train", "small", "--on", "ray", contains="run the command without torchrun")


@pytest.mark.parametrize("option", [("--workers", 2), ("--cpus", 2), ("--gpus", 1)])
def test_options_of_workers_need_ray(option):
    refuse("train", "small", *option, contains="--on ray")


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = call_mlcd("train", "small", "--on", "ray")
    assert result.returncode == 2
    assert result.stderr == f"mlcd: --on ray needs the package ray: {install_command('ray')}\n"
