"""Training on real digits: it learns, resumes bit for bit, and stops before a bad update."""

import json
import os
import signal

import numpy as np
import pytest
import torch

from mlcd.clustering.centers import Centers
from mlcd.errors import ConfigInvalid, Conflict, Diverged
from mlcd.progress import Reporter
from training.config import load_config
from training.evaluation.knn import weighted_vote
from training.loop import Interrupted
from training.run import read_run_config, run_training
from training.telemetry.metrics import MetricsLog

SILENT = Reporter("silent")


@pytest.fixture
def config(journey, digits, tiny_recipe, tmp_path):
    def make(out, *overrides):
        places = [f"data.images={digits}", f"data.labels={journey / 'labels'}", f"out={tmp_path / out}"]
        return load_config(str(tiny_recipe), [*places, *overrides])

    return make


def weights(run, step):
    folder = run.path / "checkpoints" / f"step_{step:06d}"
    return (folder / "weights" / "model.safetensors").read_bytes(), (folder / "state.safetensors").read_bytes()


def test_the_loss_falls_and_the_positives_come_nearer(config):
    run = run_training(config("run", "schedule.steps=60", "log_every=1"), SILENT)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert np.mean([line["loss"] for line in lines[-5:]]) < np.mean([line["loss"] for line in lines[:5]]) - 1
    assert lines[-1]["positive_cosine"] > lines[-1]["negative_cosine"] + 0.1
    assert {"images_per_s", "lr", "grad_norm"} <= lines[0].keys()


@pytest.mark.parametrize("kind", ["mlcd", "mlc", "cd"])
def test_every_loss_trains(config, kind):
    run = run_training(config(kind, f"loss.kind={kind}", "schedule.steps=5"), SILENT)
    assert np.isfinite(run.summary["final"]["loss"])


def test_the_trained_centers_are_unit_named_and_in_the_model_s_space(config, journey):
    run = run_training(config("run", "schedule.steps=5"), SILENT)
    centers = Centers.open(run.path / "checkpoints" / "step_000005" / "centers")
    clustered = Centers.open(journey / "centers")
    assert centers.fingerprint == run.fingerprint != clustered.fingerprint
    assert centers.names == clustered.names
    assert (centers.sizes == clustered.sizes).all()
    assert np.linalg.norm(centers.vectors, axis=1) == pytest.approx(np.ones(len(centers.vectors)), abs=1e-6)


def test_an_interrupted_run_goes_on_bit_for_bit(config):
    whole = run_training(config("whole"), SILENT)
    interrupted = config("parts")
    # A signal in the middle of training, not at a checkpoint.
    from training import loop

    original, calls = loop.train_step, []

    def stop_at_17(state, images, labels, config):
        calls.append(state.step)
        if state.step == 16 and len(calls) == 17:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(state, images, labels, config)

    loop.train_step = stop_at_17
    try:
        with pytest.raises(Interrupted):
            run_training(interrupted, SILENT)
        assert not (whole.path.parent / "parts").exists()
        again = run_training(read_run_config(whole.path.parent / "parts"), SILENT)
    finally:
        loop.train_step = original
    assert calls == list(range(17)) + list(range(17, 30))
    assert weights(whole, 30) == weights(again, 30)
    assert whole.digest == again.digest
    steps = [json.loads(line)["step"] for line in (again.path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 30]


def test_a_finished_run_is_not_repeated_and_not_overwritten(config):
    first = run_training(config("run", "schedule.steps=2"), SILENT)
    assert run_training(config("run", "schedule.steps=2"), SILENT).created_at == first.created_at
    with pytest.raises(Conflict, match="other input or settings"):
        run_training(config("run", "schedule.steps=3"), SILENT)


def test_a_loss_that_is_not_finite_stops_before_the_update(config, monkeypatch):
    import training.step as step_module

    def not_finite(*_, **__):
        return torch.tensor(torch.nan, requires_grad=True)

    run = config("run")
    monkeypatch.setattr(step_module, "mlcd_loss", not_finite)
    with pytest.raises(Diverged, match="step 0: loss nan"):
        run_training(run, SILENT)
    monkeypatch.undo()
    assert run_training(run, SILENT).summary["final"]["step"] == 30


def test_images_that_do_not_fit_into_memory_are_refused_beforehand(config):
    with pytest.raises(ConfigInvalid, match=r"raise data\.memory_gib"):
        run_training(config("run", "data.memory_gib=1e-6"), SILENT)


def test_the_log_forgets_the_steps_of_a_lost_future(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.append({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut off by a crash
    MetricsLog(tmp_path, 2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_the_vote_weighs_by_similarity():
    known = np.array([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]], dtype=np.float32)
    query = np.array([[1.0, 0.0]], dtype=np.float32)
    # One neighbor at cosine 1 outweighs two at 0.6: exp(1/0.07) > 2 exp(0.6/0.07).
    assert weighted_vote(query, known, np.array([0, 1, 1]), neighbors=3).tolist() == [0]
    assert weighted_vote(query, known, np.array([0, 1, 1]), neighbors=99).tolist() == [0]


def test_the_vote_equals_scikit_learn():
    from sklearn.datasets import load_digits
    from sklearn.neighbors import KNeighborsClassifier

    data = load_digits()
    rows = (data.data / np.linalg.norm(data.data, axis=1, keepdims=True)).astype(np.float32)
    theirs = KNeighborsClassifier(
        5, metric="cosine", weights=lambda distances: np.exp((1.0 - distances) / 0.07), algorithm="brute"
    ).fit(rows[:1400], data.target[:1400])
    ours = weighted_vote(rows[1400:], rows[:1400], data.target[:1400], neighbors=5)
    assert (ours == theirs.predict(rows[1400:])).all()
