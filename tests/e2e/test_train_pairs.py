"""`mlcd train` on images with captions by the public commands: killed, resumed, by two processes,
exported, asked for texts and served.
"""

import json
import os
import signal

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from tests.conftest import start_mlcd, succeed
from tests.e2e.test_train import (
    start_together,
    steps_of,
    wait_for_steps,
    worker_of,
)
from tests.integration.running import serving
from tests.ranks import call_together
from tests.unit.training.pairing import write_pairs

STEPS = 120
SMALL = (
    "text.width=16", "text.depth=1", "text.heads=2", "text.context_length=12",
    f"schedule.steps={STEPS}", "schedule.batch_size=8", "checkpoint.every_steps=10",
    "optim.warmup_steps=1", "compute.precision=fp32", "device=cpu", "num_threads=1",
    "log_every=1", "telemetry.peak_tflops=1", "data.workers=0",
)  # fmt: skip
TOWER = (
    "model.image_size=16", "model.patch_size=8", "model.width=16", "model.depth=1",
    "model.heads=2", "model.mlp_width=32", "model.embedding_dim=12",
)  # fmt: skip
LAST = f"checkpoints/step_{STEPS:06d}"
NUMBERS = ("loss", "grad_norm", "positive_cosine", "scale")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def command(pairs, two_tower_model, tmp_path):
    """The arguments of a run: LiT beside a tiny CLIP's tower, or both towers from scratch."""

    def make(recipe, out):
        own = TOWER
        if recipe == "lit":
            own = (f"model.start={two_tower_model}", f"data.embeddings={tmp_path / 'embeddings'}")
        return ["train", recipe, f"data.pairs={pairs}", f"out={tmp_path / out}", *SMALL, *own]

    return make


def kill_after(steps, arguments, run):
    process = start_mlcd(*arguments, start_new_session=True)
    wait_for_steps(run, steps, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not run.exists(), "the run had ended before it was killed"


def digest_of(path):
    return json.loads((path / "manifest.json").read_text())["digest"]


def embeddings_in(answer):
    return [result["embedding"] for result in answer.json()["results"]]


def assert_alike(one, other):
    logs = steps_of(one), steps_of(other)
    assert len(logs[0]) == STEPS
    for ours, theirs in zip(*logs, strict=True):
        for name in NUMBERS:
            expected = pytest.approx(theirs[name], rel=1e-3, abs=1e-5)
            assert ours[name] == expected, (ours["step"], name)


def assert_equal_tensors(one, other):
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    "recipe", ["lit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("clip", "siglip"))]
)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(recipe, command, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    succeed(*command(recipe, "whole"))
    kill_after(25, command(recipe, "parts"), parts)
    succeed("train", "--resume", parts)
    assert digest_of(parts) == digest_of(whole)
    succeed("verify", parts)


@pytest.mark.slow
def test_a_run_of_two_processes_that_was_killed_goes_on_in_one(command, tmp_path):
    more = ("compute.accumulation=2", "optim.ema=0.9")
    parts = tmp_path / "parts"
    launcher = start_together(2, *command("siglip", "parts"), *more)
    wait_for_steps(parts, 25, launcher)
    for worker in [worker_of(launcher, rank) for rank in range(2)]:
        os.kill(worker, signal.SIGKILL)
    launcher.communicate(timeout=60)
    assert not parts.exists(), "the run had ended before it was killed"
    succeed("train", "--resume", parts)
    succeed(*command("siglip", "whole"), *more)
    assert_alike(parts, tmp_path / "whole")


@pytest.mark.slow
def test_lit_by_two_processes_is_exported_and_served_with_its_image_tower_untouched(
    command, pairs, two_tower_model, tmp_path
):
    succeed("embed --engine torch", pairs, tmp_path / "embeddings", "--model", two_tower_model)
    arguments = command("lit", "together")
    together = call_together(2, *arguments)
    assert together.returncode == 0, together.stderr
    succeed(*command("lit", "alone"))
    assert_alike(tmp_path / "together", tmp_path / "alone")
    run, model = tmp_path / "together", tmp_path / "model"
    succeed("export", run, model)
    assert_equal_tensors(two_tower_model, run / LAST / "weights")
    assert_equal_tensors(two_tower_model, model)
    texts = ["a photo of the digit three", "seven, from far away", "日本語 🙂"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    succeed("embed", tmp_path / "texts.txt", tmp_path / "rows", "--model", model, "--texts")
    rows = EmbeddingsArtifact.open(tmp_path / "rows").load()
    image = next(pairs.rglob("*.png"))
    before = tmp_path / "before"
    succeed("embed", image.parent, before, "--model", two_tower_model)
    artifact = EmbeddingsArtifact.open(before)
    expected = artifact.load()[artifact.keys.index(image.name)]
    with serving(model) as server:
        answered = httpx.post(f"{server.url}/v1/texts/embed", json={"texts": texts})
        np.testing.assert_allclose(embeddings_in(answered), rows, atol=1e-4)
        data = {"files": (image.name, image.read_bytes(), "image/png")}
        shown = httpx.post(f"{server.url}/v1/images/embed", files=data)
        np.testing.assert_allclose(embeddings_in(shown), [expected], atol=1e-4)
