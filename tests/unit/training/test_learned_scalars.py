"""Runs with learned scale and bias, weighed labels, and labels that are not clusters."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlcd.artifacts.labels import LabelTable
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.pipelines.label_captions import label_captions
from mlcd.pipelines.label_classes import label_classes
from mlcd.pipelines.verify import verify
from mlcd.training.data.drawing import label_weights
from mlcd.training.head.loss_config import LossConfig
from mlcd.training.run.run_training import run_training
from tests.unit.training.running import SILENT, before_step, configured, read_log


@pytest.fixture
def run_config(labeled, digits, tiny_recipe, tmp_path):
    def make(out, *overrides, labels=None):
        quick = ("telemetry.peak_tflops=1", "schedule.steps=8", "optim.warmup_steps=0")
        often = ("checkpoint.every_steps=2", "log_every=1")
        labels = labels or labeled / "labels"
        return configured(tiny_recipe, digits, labels, tmp_path / out, *quick, *often, *overrides)

    return make


LEARNED = ["loss.learn_scale=true", "loss.learn_bias=true"]


def test_a_learned_scale_and_bias_move_are_saved_and_resumed_bit_for_bit(run_config, monkeypatch):
    options = [*LEARNED, "loss.label_weights=scores", "loss.scale=8"]
    whole = run_training(run_config("whole", *options), SILENT)
    with monkeypatch.context() as struck:
        before_step(struck, 5, lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_training(run_config("parts", *options), SILENT)
    again = run_training(run_config("parts", *options), SILENT)
    assert whole.digest == again.digest
    lines = read_log(whole)
    assert lines[0]["scale"] == pytest.approx(8, rel=1e-6)
    assert lines[0]["bias"] == pytest.approx(-math.log(10 / 2), rel=1e-6)  # k = 10, r = 1, l = 2
    assert len({line["scale"] for line in lines}) == len({line["bias"] for line in lines}) == 8
    (path,) = (whole.path / "checkpoints" / "step_000008" / "state").glob("*.safetensors")
    stored = load_file(path)
    assert {"head.log_scale", "head.bias", "moments.bias.exp_avg"} <= stored.keys()


def test_the_bias_starts_where_it_is_asked_to_or_where_both_sides_weigh_alike():
    def bias(**fields):
        return LossConfig(**fields).resolve_bias(1_000_000)

    assert bias() == 0.0
    assert bias(learn_bias=True) == pytest.approx(-math.log(0.1 * 1_000_000 / 8))
    assert bias(learn_bias=True, labels_per_image=4, negative_ratio=0.5) == pytest.approx(
        -math.log(0.5 * 1_000_000 / 4)
    )
    assert bias(learn_bias=True, bias=-10.0) == -10.0
    assert bias(learn_bias=True, bias=0.0) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["loss.kind=mlc", "loss.learn_bias=true"],
            "loss.learn_bias requires loss.kind=mlcd, got mlc",
        ),
        (["loss.kind=cd", "loss.bias=-1"], "loss.bias requires loss.kind=mlcd, got cd"),
        (["loss.kind=cd", "loss.label_weights=scores"], "requires at least 2 labels per image"),
    ],
)
def test_dead_options_are_refused(options, message, run_config):
    with pytest.raises(ConfigInvalid, match=message):
        run_config("run", *options)


def test_weights_are_scores_relative_to_their_mean():
    scores = np.array([[0.6, 0.2, 0.0], [0.5, -0.5, 0.1], [-0.1, -0.2, 0.3]], dtype=np.float16)
    labels = np.array([[3, 4, -1], [1, 2, 5], [7, 8, -1]], dtype=np.int32)
    weights = label_weights(scores, labels)
    assert weights.tolist() == [
        pytest.approx([1.5, 0.5, 0.0], abs=1e-3),
        pytest.approx([2.5, 0.0, 0.5], abs=1e-3),
        pytest.approx([1.0, 1.0, 0.0], abs=1e-3),
    ]


def test_the_loader_s_weights_are_those_of_the_labels_that_it_drew(run_config):
    from mlcd.training.data.dataset import open_dataset
    from mlcd.training.data.loader import Loader

    config = run_config(
        "run", "loss.labels_per_image=1", "loss.drawn_from=2", "loss.kind=mlc"
    ).model_copy(update={"loss": LossConfig(labels_per_image=2, label_weights="scores")})
    dataset = open_dataset(config)
    (part,) = dataset.parts
    with Loader(dataset, config, rank=0, size=1, start_step=0) as loader:
        (batch,) = next(iter(loader)).parts
    row_of_key = {entry.key: row for row, entry in enumerate(part.entries)}
    rows = [row_of_key[key] for key in batch.keys]
    assert torch.equal(batch.labels, torch.from_numpy(part.labels[rows].astype(np.int64)))
    expected = label_weights(part.scores[rows], part.labels[rows])
    assert torch.equal(batch.weights, torch.from_numpy(expected))
    assert batch.weights.sum(dim=1).tolist() == pytest.approx([2.0] * len(rows), rel=1e-5)


def test_folders_are_classes_that_a_tower_is_fine_tuned_on(run_config, digits, tmp_path):
    labels = label_classes(str(digits), tmp_path / "classes", SILENT)
    table = LabelTable.open(labels.path)
    assert (table.num_centers, table.names) == (10, [str(digit) for digit in range(10)])
    assert all(
        key.startswith(f"{table.names[ids[0]]}/")
        for key, ids in zip(table.keys, table.ids, strict=True)
    )
    assert label_classes(str(digits), tmp_path / "classes", SILENT).created_at == labels.created_at
    list(verify(labels.path))
    options = ["loss.kind=cd", "loss.margin_kind=none", "loss.labels_per_image=1"]
    run = run_training(run_config("run", *options, labels=labels.path), SILENT)
    again = run_config("again", *options, f"model={{start: {run.path}}}", labels=labels.path)
    assert read_log(run_training(again, SILENT))[0]["loss"] < 2.5


def test_the_rarest_tokens_of_captions_are_labels_with_their_rarity(digits, tmp_path):
    """Words that one image alone has are none; images without a caption have no label."""
    images = shutil.copytree(digits / "0", tmp_path / "images")
    files = sorted(file.name for file in images.glob("*.png"))[:8]
    for other in set(images.glob("*.png")) - {images / name for name in files}:
        other.unlink()
    told = ["A red dog", "a cat", "red cat", "a bird", "a red cat", "a red dog", "a red dog"]
    rows = [{"path": name, "caption": text} for name, text in zip(files, told, strict=False)]
    (images / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = label_captions(str(images), tmp_path / "tokens", SILENT, top=2)
    table = LabelTable.open(made.path)
    named = [[table.names[number] for number in row if number >= 0] for row in table.ids]
    expected = [["dog", "red"], ["cat", "a"], ["cat", "red"], ["a"], ["cat", "red"]]
    assert named == [*expected, ["dog", "red"], ["dog", "red"], []]
    share = {"dog": 3 / 8, "cat": 3 / 8, "red": 5 / 8, "a": 6 / 8}
    for words, scores in zip(named, table.scores, strict=True):
        rarity = [-math.log(share[word]) for word in words]
        assert scores[: len(words)] == pytest.approx(rarity, rel=1e-3)
    (images / "captions.jsonl").unlink()
    with pytest.raises(InvalidInput, match="share, got 0"):
        label_captions(str(images), tmp_path / "none", SILENT, top=2)
