"""A step that is not finite is caught before the update, kept as it was, replayed, and left out
where that is allowed.
"""

import copy
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlcd.errors import Diverged
from mlcd.training.bad_batch import read_bad_batch
from mlcd.training.preemption import Preempted
from mlcd.training.replay import replay
from mlcd.training.run.run_training import run_training
from tests.unit.training.running import SILENT, VIEWS, before_step, read_log


def poison_weight(state):
    with torch.no_grad():
        state.model.trunk.blocks[1].mlp.fc1.weight[3, 5] = torch.nan


def poison_center(state):
    with torch.no_grad():
        state.head.weight[4] = torch.inf


@pytest.mark.parametrize(
    ("poison", "weight", "module"),
    [
        (poison_weight, "trunk.blocks.1.mlp.fc1.weight", "trunk.blocks.1.mlp.fc1"),
        (poison_center, "centers.weight", "centers"),
    ],
)
def test_what_is_not_finite_is_caught_before_the_update_and_replayed(
    config, monkeypatch, poison, weight, module
):
    recipe = config("run", "telemetry.keys=true", "compute.accumulation=2")
    states = []
    before_step(monkeypatch, 7, lambda state: (poison(state), states.append(copy.deepcopy(state))))
    with pytest.raises(
        Diverged, match=r"step 7: loss nan, .*; the batch is in .*step_000007-rank0"
    ):
        run_training(recipe, SILENT)
    monkeypatch.undo()
    folder = Path(recipe.out + ".partial") / "bad_batches"
    kept = json.loads((folder / "step_000007-rank0" / "batch.json").read_text())
    logged = [
        json.loads(line) for line in (folder.parent / "keys-0.jsonl").read_text().splitlines()
    ]
    assert len(logged) == 7  # of the steps before
    assert (kept["step"], kept["loss"]) == (7, "nan")
    # Nothing was updated: the state beside it is the one that met the batch.
    saved = load_file(folder / "step_000007-state" / "weights" / "model.safetensors")
    for name, parameter in states[0].model.trunk.named_parameters():
        assert torch.equal(saved[name].nan_to_num(), parameter.detach().nan_to_num()), name
    found = replay(Path(recipe.out), folder / "step_000007-rank0")
    assert (found.step, str(found.loss), found.not_finite, found.first_output) == (
        7,
        "nan",
        [weight],
        module,
    )
    # Without it the run goes on, from the last checkpoint.
    again = run_training(recipe, SILENT)
    assert again.summary["final"]["step"] == 30
    keys = [json.loads(line) for line in (again.path / "keys-0.jsonl").read_text().splitlines()]
    assert keys[7]["keys"] == [key for part in kept["keys"] for key in part]


@pytest.mark.parametrize("options", [(), VIEWS])
def test_a_replayed_batch_gives_the_loss_that_it_had(config, monkeypatch, options):
    """The guard alone is struck: what it saved is a sound batch, whose loss is known."""
    import mlcd.training.step as step_module

    whole = run_training(config("whole", "log_every=1", "schedule.steps=8", *options), SILENT)
    original = step_module.clip_global_norm

    def break_norm(backbone, centers, max_norm, world):
        norms = original(backbone, centers, max_norm, world)
        return (norms[0] * torch.nan, norms[1]) if steps == [0, 1, 2, 3, 4, 5, 6, 7] else norms

    recipe = config("run", "schedule.steps=8", *options)
    monkeypatch.setattr(step_module, "clip_global_norm", break_norm)
    steps = before_step(monkeypatch, -1, None)
    with pytest.raises(Diverged, match="step 7"):
        run_training(recipe, SILENT)
    monkeypatch.undo()
    found = replay(Path(recipe.out), Path("step_000007-rank0"))
    expected = read_log(whole)[7]
    assert found.loss == pytest.approx(expected["loss"], rel=1e-6)
    assert found.grad_norm == pytest.approx(expected["grad_norm"], rel=1e-6)
    assert (found.not_finite, found.first_output, found.first_gradient) == ([], None, None)


def test_a_batch_kept_on_more_processes_before_is_not_mixed_in(config, monkeypatch):
    recipe = config("run")
    folder = Path(recipe.out + ".partial") / "bad_batches"
    for attempt in range(2):
        before_step(monkeypatch, 7, poison_weight)
        with pytest.raises(Diverged, match="step 7"):
            run_training(recipe, SILENT)
        monkeypatch.undo()
        assert sorted(path.name for path in folder.iterdir()) == [
            "step_000007-rank0",
            "step_000007-state",
        ], attempt
        shutil.copytree(folder / "step_000007-rank0", folder / "step_000007-rank3")
    (part,) = read_bad_batch(folder / "step_000007-rank0")[1]
    assert (
        len(part.positions) == 2 * recipe.schedule.batch_size
    )  # what the copy of this attempt does


def test_a_budget_of_skips_is_spent_and_survives_an_interruption(config, monkeypatch):
    from mlcd.training import step as step_module

    recipe = config("run", "optim.max_skips=2", "log_every=1", "checkpoint.every_steps=5")
    original = step_module.backward
    bad = {3, 8}

    def backward(state, *rest):
        loss, meters = original(state, *rest)
        return (loss * torch.nan if state.step in bad else loss), meters

    monkeypatch.setattr(step_module, "backward", backward)
    with monkeypatch.context() as inner:
        before_step(inner, 10, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted):
            run_training(recipe, SILENT)
    again = run_training(recipe, SILENT)
    log = read_log(again)
    assert [line["step"] for line in log] == [step for step in range(1, 31) if step - 1 not in bad]
    assert log[-1]["skipped_steps"] == again.summary["skipped_steps"] == 2
    assert sorted(path.name for path in (again.path / "bad_batches").glob("*-rank0")) == [
        "step_000003-rank0", "step_000008-rank0"
    ]  # fmt: skip
    bad |= {20}
    with pytest.raises(Diverged, match="step 20"):
        run_training(config("other", "optim.max_skips=2"), SILENT)
