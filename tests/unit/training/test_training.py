"""Training on real digits: it learns, resumes bit for bit, and evaluates without a trace."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import open_artifact
from mlcd.errors import ConfigInvalid, Conflict, Unavailable
from mlcd.models.runs import find_checkpoint
from mlcd.progress import Reporter
from mlcd.training.evaluation.knn import count_votes
from mlcd.training.evaluation.seen import find_seen
from mlcd.training.evaluation.while_training import open_evaluation
from mlcd.training.preemption import Interrupted, Preempted
from mlcd.training.processes import Processes
from mlcd.training.run.run_files import read_run_config
from mlcd.training.run.run_training import initial_state, run_training
from mlcd.world import World
from tests.unit.training.conftest import label_images
from tests.unit.training.running import SILENT, VIEWS, before_step, read_log, saved_bytes


def test_the_loss_falls_and_the_positives_come_nearer(config):
    run = run_training(config("run", "schedule.steps=60", "log_every=1"), SILENT)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert (
        np.mean([line["loss"] for line in lines[-5:]])
        < np.mean([line["loss"] for line in lines[:5]]) - 1
    )
    assert lines[-1]["positive_cosine"] > lines[-1]["negative_cosine"] + 0.1
    assert {"images_per_s", "lr", "grad_norm"} <= lines[0].keys()


def test_the_trained_centers_are_unit_named_and_in_the_model_s_space(config, journey):
    run = run_training(config("run", "schedule.steps=5"), SILENT)
    centers = Centers.open(run.path / "checkpoints" / "step_000005" / "centers")
    clustered = Centers.open(journey / "centers")
    assert centers.fingerprint == run.fingerprint != clustered.fingerprint
    assert centers.names == clustered.names
    assert (centers.sizes == clustered.sizes).all()
    assert np.linalg.norm(centers.vectors, axis=1) == pytest.approx(
        np.ones(len(centers.vectors)), abs=1e-6
    )


@pytest.mark.parametrize(
    ("number", "kind", "options"),
    [
        (signal.SIGTERM, Preempted, ()),
        (signal.SIGUSR1, Preempted, VIEWS),
        (signal.SIGINT, Interrupted, ()),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(config, monkeypatch, number, kind, options):
    whole = run_training(config("whole", "telemetry.keys=true", *options), SILENT)
    # A signal in the middle of training, not at a checkpoint; the step that is under way ends, and
    # one more.
    begun = before_step(
        monkeypatch, 15, lambda _: os.kill(os.getpid(), number) if len(begun) == 16 else None
    )
    with pytest.raises(Interrupted) as stopped:
        run_training(config("parts", "telemetry.keys=true", *options), SILENT)
    assert type(stopped.value) is kind
    assert not (whole.path.parent / "parts").exists()
    again = run_training(read_run_config(whole.path.parent / "parts"), SILENT)
    assert begun == list(range(17)) + list(range(17, 30))
    assert saved_bytes(whole, 30) == saved_bytes(again, 30)
    assert whole.digest == again.digest
    assert [line["step"] for line in read_log(again)] == [10, 20, 30]
    assert (again.path / "keys-0.jsonl").read_bytes() == (whole.path / "keys-0.jsonl").read_bytes()


@pytest.mark.parametrize(
    "options",
    [[], ["loss.negative_ratio=0.4"], ["loss.negative_ratio=0.4", "loss.policy=partialfc"]],
)
def test_micro_batches_equal_the_whole_batch(config, options):
    """Also negatives drawn for labels (partialfc), and parts of unequal size: 30 = 8 + 8 + 7 + 7."""
    logs = [
        read_log(
            run_training(
                config(
                    f"run{parts}",
                    f"compute.accumulation={parts}",
                    "compute.precision=fp64",
                    "schedule.steps=8",
                    "schedule.batch_size=30",
                    "log_every=1",
                    *options,
                ),
                SILENT,
            )
        )
        for parts in (1, 2, 4)
    ]
    for log in logs[1:]:
        for one, other in zip(logs[0], log, strict=True):
            for name in (
                "loss",
                "grad_norm",
                "center_grad_norm",
                "positive_cosine",
                "unique_positives",
            ):
                assert other[name] == pytest.approx(one[name], rel=1e-12, abs=1e-12), name


def test_a_step_without_any_usable_sample_changes_nothing(config, digits, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(digits, images)
    for path in sorted(images.rglob("*.png"))[::2]:
        path.write_bytes(bytes(path.stat().st_size))
    run = run_training(
        config("run", f"data.images={images}", "schedule.batch_size=1", "log_every=1"), SILENT
    )
    log = read_log(run)
    empty = [line["loss"] is None for line in log]
    assert 5 < sum(empty) < 25
    assert log[-1]["skipped_samples"] == sum(empty)
    assert all(np.isfinite(line["loss"]) for line in log if line["loss"] is not None)


def test_images_that_go_away_stop_the_run_which_then_goes_on(config, digits, tmp_path, monkeypatch):
    """A mount that is lost: the rest of the schedule must not pass as if it were training."""
    images = tmp_path / "images"
    shutil.copytree(digits, images)
    options = (f"data.images={images}", "checkpoint.every_steps=5", "schedule.batch_size=32")
    options += ("data.memory_gib=0", "data.workers=0")
    begun = before_step(monkeypatch, 8, lambda _: images.rename(tmp_path / "away"))
    with pytest.raises(Unavailable, match="cannot be read"):
        run_training(config("run", *options), SILENT)
    assert begun[-1] < 29
    monkeypatch.undo()
    (tmp_path / "away").rename(images)
    run = run_training(config("run", *options), SILENT)
    assert read_log(run)[-1]["loss"] is not None


def test_recomputing_activations_changes_nothing(config):
    kept, recomputed = (
        run_training(config(f"run-{flag}", f"compute.recompute={flag}", "schedule.steps=5"), SILENT)
        for flag in ("false", "true")
    )
    assert saved_bytes(kept, 5) == saved_bytes(recomputed, 5)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler warns about its own internals
def test_compiled_blocks_compute_the_same(config):
    eager, compiled = (
        read_log(
            run_training(
                config(f"run-{flag}", f"compute.compile={flag}", "schedule.steps=5"), SILENT
            )
        )
        for flag in ("false", "true")
    )
    assert compiled[-1]["loss"] == pytest.approx(eager[-1]["loss"], rel=1e-4)


def test_bfloat16_is_near_and_keeps_float32_weights(config):
    exact, rounded = (
        run_training(
            config(precision, f"compute.precision={precision}", "schedule.steps=5"), SILENT
        )
        for precision in ("fp32", "bf16")
    )
    losses = [read_log(run)[-1]["loss"] for run in (exact, rounded)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    stored = load_file(
        rounded.path / "checkpoints" / "step_000005" / "weights" / "model.safetensors"
    )
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_a_run_is_not_begun_without_the_evaluation_that_it_asks_for(config):
    recipe = config("run", "evaluation.every_steps=10")
    with pytest.raises(ConfigInvalid, match="requires the argument open_evaluation"):
        run_training(recipe, SILENT)
    assert not Path(f"{recipe.out}.partial").exists()


def test_evaluating_changes_nothing_but_the_log(config):
    plain, evaluated = (
        run_training(
            config(f"run-{len(options)}", *options), SILENT, open_evaluation=open_evaluation
        )
        for options in ([], ["evaluation.every_steps=10", "evaluation.linear_probe=true"])
    )
    assert saved_bytes(plain, 30) == saved_bytes(evaluated, 30)
    measured = [line for line in read_log(evaluated) if "knn" in line]
    assert [line["step"] for line in measured] == [10, 20, 30]
    assert all(0 < line[name] <= 1 for line in measured for name in ("knn", "linear_probe"))
    assert evaluated.summary["final"]["loss"] == plain.summary["final"]["loss"]


def test_the_head_starts_from_given_centers(config, journey, tmp_path):
    trained = (
        run_training(config("run", "schedule.steps=5"), SILENT).path
        / "checkpoints"
        / "step_000005"
        / "centers"
    )
    again = run_training(config("again", f"data.centers={trained}", "schedule.steps=5"), SILENT)
    start = Centers.open(again.path / "checkpoints" / "step_000000" / "centers")
    assert np.allclose(start.vectors, Centers.open(trained).vectors, atol=1e-7)
    assert [parent.digest for parent in again.parents if parent.role == "centers"] == [
        Centers.open(trained).digest
    ]
    with pytest.raises(
        ConfigInvalid, match="the head must start from"
    ):  # their dimension is that of the features
        run_training(config("wrong", f"data.centers={journey / 'centers'}"), SILENT)


def test_the_tower_and_every_block_of_centers_begin_with_numbers_of_their_own(config):
    """Blocks have 4096 centers, here of 16 numbers each; the tower draws its class token first."""
    state = initial_state(config("run"), 3 * 4096, Processes(World(), torch.device("cpu")))
    tower = state.model.trunk.cls.detach()
    begins = torch.stack(
        [tower[:16] * len(tower) ** 0.5, *(state.head.weight.detach()[::4096] / 0.01)]
    )
    assert torch.pdist(begins).min() > 1


def test_a_finished_run_is_not_repeated_and_not_overwritten(config):
    first = run_training(config("run", "schedule.steps=2", "optim.warmup_steps=0"), SILENT)
    assert (
        run_training(config("run", "schedule.steps=2", "optim.warmup_steps=0"), SILENT).created_at
        == first.created_at
    )
    with pytest.raises(Conflict, match=r"other settings: schedule.steps=3, before 2"):
        run_training(config("run", "schedule.steps=3", "optim.warmup_steps=0"), SILENT)


def test_what_is_held_out_is_never_trained_on_or_clustered(config, journey):
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.training.data.dataset import open_dataset

    features = EmbeddingsArtifact.open(journey / "features")
    out = {key for key, held in zip(features.keys, features.held_out(0.2), strict=True) if held}
    assert 30 < len(out) < 50
    (part,) = open_dataset(config("run", "data.hold_out=0.2")).parts
    assert {entry.key for entry in part.entries} == set(features.keys) - out
    clustered = Centers.open(journey / "centers")
    assert clustered.sizes.sum() == len(features.keys) - len(out)
    kept = features.load()[~features.held_out(0.2)]
    assert clustered.mean == pytest.approx(kept.mean(axis=0), abs=1e-6)


def test_broken_files_do_not_shift_the_split(journey, digits, tmp_path):
    """A rule over the usable images only would hold out others where some are broken."""
    from mlcd.artifacts.embeddings import EmbeddingsArtifact
    from mlcd.encoders import open_encoder
    from mlcd.images.sources import open_source
    from mlcd.keys import mask_held_out, split_positions
    from mlcd.pipelines.embed import embed

    images = tmp_path / "images"
    shutil.copytree(digits, images)
    for folder in images.iterdir():
        for number in range(10):
            (folder / f"junk{number}.png").write_bytes(b"junk")
    source = open_source(str(images))
    embed(source, open_encoder("pixels"), tmp_path / "out", Reporter("silent"))
    stored = EmbeddingsArtifact.open(tmp_path / "out")
    everything = mask_held_out(
        split_positions([e.key for e in source.entries], [e.class_name for e in source.entries])
    )
    listed = {entry.key for entry, held in zip(source.entries, everything, strict=True) if held}
    usable = {key for key, held in zip(stored.keys, stored.held_out(0.2), strict=True) if held}
    assert usable == listed & set(stored.keys)


def test_folders_that_are_parts_are_warned_of(config, digits, tmp_path, caplog):
    sides = tmp_path / "sides"
    shutil.copytree(digits, sides / "train")
    shutil.copytree(digits / "3", sides / "test" / "3")
    labels = label_images(sides, tmp_path / "made") / "labels"
    run_training(
        config(
            "run",
            f"data.images={sides}",
            f"data.labels={labels}",
            "schedule.steps=2",
            "optim.warmup_steps=1",
        ),
        SILENT,
    )
    assert f"the folders test, train of {sides} are parts of a data set" in caplog.text
    assert f"such as {sides}/train" in caplog.text


def test_what_was_trained_on_is_not_known_once_images_were_added(config, digits, tmp_path):
    """The split covers all images of a folder, so that others would be held out now."""
    images = tmp_path / "images"
    shutil.copytree(digits, images)
    run = run_training(config("run", f"data.images={images}"), SILENT)
    checkpoint = open_artifact(find_checkpoint(run.path), "checkpoint")
    assert len(find_seen(checkpoint).trained)
    shutil.copy(min((images / "3").iterdir()), images / "3" / "another.png")
    seen = find_seen(checkpoint)
    assert not len(seen.trained)
    assert any("other images than when the run started" in each for each in seen.unknown)


def test_gradients_are_clipped(config, monkeypatch):
    import mlcd.training.step as step_module

    seen = []
    original = step_module.clip_global_norm

    def spy(backbone, centers, max_norm, world):
        norms = original(backbone, centers, max_norm, world)
        squares = (
            sum(p.grad.square().sum() for p in backbone)
            + centers[0].grad.coalesce().values().square().sum()
        )
        seen.append((max_norm, squares.sqrt().item(), [norm.item() for norm in norms]))
        return norms

    monkeypatch.setattr(step_module, "clip_global_norm", spy)
    run_training(
        config("run", "schedule.steps=3", "optim.warmup_steps=0", "optim.clip_norm=0.01"), SILENT
    )
    assert all(
        after == pytest.approx(0.01, rel=1e-3) and max(before) > 0.1 for _, after, before in seen
    )


def test_only_matrices_decay():
    from mlcd.models.vit import ViT, ViTConfig
    from mlcd.training.optim.groups import parameter_groups
    from mlcd.training.optim.optim_config import OptimConfig

    trunk = ViT(ViTConfig(16, 8, 32, 1, 2, 64, 16))
    decayed, plain = parameter_groups(trunk, OptimConfig(weight_decay=0.1))
    names = {id(parameter): name for name, parameter in trunk.named_parameters()}
    assert {names[id(p)] for p in plain["params"]} >= {
        "cls",
        "pos",
        "norm_pre.weight",
        "blocks.0.attn.qkv.bias",
    }
    assert {names[id(p)] for p in decayed["params"]} == {
        "patch.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.out.weight",
        "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "proj.weight",
    }  # fmt: skip
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_a_held_out_image_never_votes_for_itself():
    """With random vectors a leak of the queries into the known rows would give accuracy 1."""
    from mlcd.training.evaluation.knn import knn
    from mlcd.training.evaluation.splits import LabeledRows

    generator = np.random.default_rng(0)
    rows = generator.standard_normal((400, 64)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    classes = [str(c) for c in generator.integers(0, 10, 400)]
    splits = (np.arange(400) + 0.5) / 400
    keys = [str(row) for row in range(400)]
    metrics = dict(knn(LabeledRows(rows, keys, splits, classes), neighbors=1, hold_out=0.5))
    assert metrics["test_images"] == 200
    assert metrics["knn_accuracy"] < 0.25


def test_the_vote_equals_scikit_learn():
    from sklearn.datasets import load_digits
    from sklearn.neighbors import KNeighborsClassifier

    data = load_digits()
    rows = (data.data / np.linalg.norm(data.data, axis=1, keepdims=True)).astype(np.float32)
    theirs = KNeighborsClassifier(
        5,
        metric="cosine",
        weights=lambda distances: np.exp((1.0 - distances) / 0.07),
        algorithm="brute",
    ).fit(rows[:1400], data.target[:1400])
    votes = count_votes(rows[1400:], rows[:1400], data.target[:1400], num_classes=10, neighbors=5)
    ours = votes.argmax(axis=1)
    assert (ours == theirs.predict(rows[1400:])).all()


def test_a_run_of_an_earlier_version_is_refused_by_name(config, monkeypatch):
    """It cropped and drew otherwise: what went on would be half of one run and half of another."""
    unfinished, finished = config("unfinished"), config("finished", "schedule.steps=5")
    with monkeypatch.context() as earlier:
        earlier.setattr("mlcd.training.config.ARITHMETIC", 1)
        earlier.setattr("mlcd.training.run.run_training.ARITHMETIC", 1)
        run_training(finished, SILENT)
        before_step(earlier, 12, lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted):
            run_training(unfinished, SILENT)
    for run in (unfinished, finished):
        with pytest.raises(Conflict, match=f"{run.out} was started by another version of mlcd"):
            run_training(run, SILENT)
