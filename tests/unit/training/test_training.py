"""Training on real digits: it learns, resumes bit for bit, and stops before a bad update."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch

from mlcd.clustering.centers import Centers
from mlcd.errors import ConfigInvalid, Conflict, Diverged, InvalidInput
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


@pytest.mark.parametrize("kind", ["mlcd", "mlc", "cd", "per_column"])
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
    import training.parallel.partial_fc as head_module

    def not_finite(lse_positive, lse_negative, **_):
        return lse_positive * torch.nan

    run = config("run")
    monkeypatch.setattr(head_module, "mlcd_from_log_sums", not_finite)
    with pytest.raises(Diverged, match="step 0: loss nan"):
        run_training(run, SILENT)
    monkeypatch.undo()
    assert run_training(run, SILENT).summary["final"]["step"] == 30


def test_images_that_do_not_fit_into_memory_are_refused_beforehand(config):
    with pytest.raises(ConfigInvalid, match=r"raise data\.memory_gib"):
        run_training(config("run", "data.memory_gib=1e-6"), SILENT)


def test_what_is_held_out_is_never_trained_on_or_clustered(config, journey, digits):
    from mlcd.embeddings import EmbeddingsArtifact
    from mlcd.images.sources import open_source
    from mlcd.labels.table import LabelTable
    from training.data.samples import load_samples

    features = EmbeddingsArtifact.open(journey / "features")
    out = {key for key, held in zip(features.keys, features.held_out(0.2), strict=True) if held}
    assert 30 < len(out) < 50
    samples = load_samples(
        open_source(str(digits)),
        LabelTable.open(journey / "labels"),
        image_size=16,
        labels_per_image=2,
        hold_out=0.2,
        memory_gib=1,
    )
    assert set(samples.keys) == set(features.keys) - out
    clustered = Centers.open(journey / "centers")
    assert clustered.sizes.sum() == len(features.keys) - len(out)
    kept = features.load()[~features.held_out(0.2)]
    assert clustered.mean == pytest.approx(kept.mean(axis=0), abs=1e-6)


def test_broken_files_do_not_shift_the_split(journey, digits, tmp_path):
    """A rule over the usable images only would hold out others where some are broken."""
    from mlcd.embeddings import EmbeddingsArtifact
    from mlcd.encoders import open_encoder
    from mlcd.images.sources import open_source
    from mlcd.keys import held_out, split_positions
    from mlcd.pipelines.embed import embed
    from mlcd.progress import Reporter

    images = tmp_path / "images"
    shutil.copytree(digits, images)
    for folder in images.iterdir():
        for number in range(10):
            (folder / f"junk{number}.png").write_bytes(b"junk")
    source = open_source(str(images))
    embed(source, open_encoder("pixels"), tmp_path / "out", Reporter("silent"))
    stored = EmbeddingsArtifact.open(tmp_path / "out")
    everything = held_out(split_positions([e.key for e in source.entries], [e.class_name for e in source.entries]))
    listed = {entry.key for entry, held in zip(source.entries, everything, strict=True) if held}
    usable = {key for key, held in zip(stored.keys, stored.held_out(0.2), strict=True) if held}
    assert usable == listed & set(stored.keys)


def test_other_images_under_the_same_keys_are_refused(config, digits, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(digits, other)
    first, second, *_ = sorted((other / "3").iterdir())
    first.write_bytes(second.read_bytes())
    with pytest.raises(InvalidInput, match="not those that were labeled"):
        run_training(config("run", f"data.images={other}", "data.hold_out=0"), SILENT)


def test_labels_that_leave_no_negative_or_are_not_there_are_refused(config, journey):
    with pytest.raises(ConfigInvalid, match="label with --top 50"):
        run_training(config("run", "loss.labels_per_image=50"), SILENT)


def test_gradients_are_clipped(config, monkeypatch):
    import training.step as step_module

    seen = []
    original = step_module.clip_global_norm

    def spy(backbone, centers, max_norm, world):
        norms = original(backbone, centers, max_norm, world)
        squares = sum(p.grad.square().sum() for p in backbone) + centers[0].grad.coalesce().values().square().sum()
        seen.append((max_norm, squares.sqrt().item(), [norm.item() for norm in norms]))
        return norms

    monkeypatch.setattr(step_module, "clip_global_norm", spy)
    run_training(config("run", "schedule.steps=3", "optim.clip_norm=0.01"), SILENT)
    assert all(after == pytest.approx(0.01, rel=1e-3) and max(before) > 0.1 for _, after, before in seen)


def test_only_matrices_decay():
    from mlcd.models.vit import ViT, ViTConfig
    from training.config import OptimConfig
    from training.optim.groups import parameter_groups

    trunk = ViT(ViTConfig(16, 8, 32, 1, 2, 64, 16))
    decayed, plain = parameter_groups(trunk, OptimConfig(weight_decay=0.1))
    names = {id(parameter): name for name, parameter in trunk.named_parameters()}
    assert {names[id(p)] for p in plain["params"]} >= {"cls", "pos", "norm_pre.weight", "blocks.0.attn.qkv.bias"}
    assert {names[id(p)] for p in decayed["params"]} == {
        "patch.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.out.weight",
        "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "proj.weight",
    }  # fmt: skip
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_a_held_out_image_never_votes_for_itself():
    """With random vectors a leak of the queries into the known rows would give accuracy 1."""
    from training.evaluation.knn import knn
    from training.evaluation.representations import Representation

    generator = np.random.default_rng(0)
    rows = generator.standard_normal((400, 64)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    classes = [str(c) for c in generator.integers(0, 10, 400)]
    splits = (np.arange(400) + 0.5) / 400
    metrics = dict(knn(Representation("r", None, rows, splits, classes), neighbors=1, hold_out=0.5))
    assert metrics["held_out_images"] == 200
    assert metrics["knn_accuracy"] < 0.25


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
