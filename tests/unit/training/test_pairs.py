"""Training on images with captions: LiT over cached embeddings, and both towers."""

import hashlib
import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlcd.artifacts.manifest import open_artifact
from mlcd.encoders import open_text_encoder
from mlcd.errors import ConfigInvalid
from mlcd.export.model_artifact import export_model
from mlcd.images.sources import open_source
from mlcd.models.runs import find_checkpoint
from mlcd.models.servable_text import ServableText
from mlcd.pipelines.embed import embed
from mlcd.training.data.order import locate
from mlcd.training.evaluation.seen import find_seen
from mlcd.training.pairs import cached_views
from mlcd.training.pairs.pair_batches import PairReader
from mlcd.training.pairs.pairs_dataset import open_pairs
from mlcd.training.pairs.pairs_flops import pair_flops
from mlcd.training.pairs.pairs_step import backward, pair_step
from mlcd.training.pairs.tokens import CaptionTokens, open_tokenizer
from mlcd.training.processes import Processes
from mlcd.training.run import run_pairs as pairs_run
from mlcd.training.run.run_pairs import run_pairs
from mlcd.world import World
from tests.open_clip_files import open_clip_module
from tests.ranks import run_ranks
from tests.unit.training.pairing import (
    KINDS,
    NUM_IMAGES,
    OPEN_CLIP,
    gradients,
    new_state,
    pairs_config,
    random_batch,
    rows,
    run,
    write_pairs,
)
from tests.unit.training.running import SILENT, read_log
from tests.unit.training.test_plan import counted

LIT = {"start": None, "freeze": "image", "embedding_dim": 32, "width": 32, "mlp_width": 64}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def lit(pairs, two_tower_model, tmp_path):
    """Configurations of LiT that start from a tiny CLIP's tower."""
    model = {**LIT, "start": str(two_tower_model), "activation": "quick_gelu"}

    def make(out, **sections):
        return pairs_config(
            tmp_path / out, pairs, **{**sections, "model": {**model, **sections.get("model", {})}}
        )

    return make


def at_last_step(run, part):
    return load_file(run.path / "checkpoints" / "step_000006" / part / "model.safetensors")


def struck(monkeypatch, number):
    """A run stops with the error of a machine that is gone when step `number` begins."""
    original = pairs_run.pair_step

    def step(state, *rest):
        if state.step == number:
            raise ConnectionError
        return original(state, *rest)

    monkeypatch.setattr(pairs_run, "pair_step", step)


def test_lit_trains_the_texts_alone_over_embeddings_made_once(
    lit, two_tower_model, tmp_path, monkeypatch
):
    config = lit("run")
    done = run_pairs(config, SILENT)
    assert done.summary["samples"] == NUM_IMAGES - 1
    assert done.summary["without_caption"] == 1
    untouched = load_file(two_tower_model / "model.safetensors")
    assert all(
        torch.equal(tensor, untouched[name])
        for name, tensor in at_last_step(done, "weights").items()
    )
    first, last = (
        (done.path / "checkpoints" / step / "weights" / "model.safetensors").read_bytes()
        for step in ("step_000000", "step_000006")
    )
    assert first == last
    # What was embedded is found again, and no image is decoded any more.
    assert (tmp_path / "run-embeddings" / "manifest.json").is_file()
    monkeypatch.setattr("mlcd.training.pairs.features.embed", None)
    again = run_pairs(lit("again", data={"embeddings": str(tmp_path / "run-embeddings")}), SILENT)
    assert read_numbers(again) == read_numbers(done)
    # The artifact that the service reads embeds texts as the trained tower does.
    monkeypatch.undo()
    export_model(str(done.path), tmp_path / "model", name="lit", reporter=SILENT)
    encoder = open_text_encoder(str(tmp_path / "model"))
    texts = ["a photo of the digit three", "7"]
    trained = ServableText.read(done.path / "checkpoints" / "step_000006" / "text")
    with torch.no_grad():
        expected = trained(torch.from_numpy(trained.tokenizer(texts))).numpy()
    np.testing.assert_allclose(encoder.encode(encoder.tokenizer(texts)), expected, atol=1e-5)
    scale = read_log(done)[-1]["scale"]
    assert encoder.calibration.scale == pytest.approx(scale, rel=1e-2)


def read_numbers(run):
    """The log without what depends on the clock."""
    clocked = {"images_per_s", "tflops", "mfu", "data_wait", "peak_memory_gib"}
    return [{k: v for k, v in line.items() if k not in clocked} for line in read_log(run)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_was_struck_ends_with_the_same_bits(pairs, tmp_path, monkeypatch, accumulation):
    """Both towers from scratch, from decoded images."""
    more = {"compute": {"accumulation": accumulation}, "augment": {"min_area": 0.5}}
    more["optim"] = {"warmup_steps": 1, "ema": 0.5}
    whole = run_pairs(pairs_config(tmp_path / "whole", pairs, kind="siglip", **more), SILENT)
    config = pairs_config(tmp_path / "parts", pairs, kind="siglip", **more)
    struck(monkeypatch, 3)
    with pytest.raises(ConnectionError):
        run_pairs(config, SILENT)
    monkeypatch.undo()
    parts = run_pairs(config, SILENT)
    assert read_numbers(parts) == read_numbers(whole)
    for part in ("weights", "text"):
        expected = at_last_step(whole, part)
        assert all(
            torch.equal(each, expected[name]) for name, each in at_last_step(parts, part).items()
        )
    begun = load_file(whole.path / "checkpoints" / "step_000000" / "weights" / "model.safetensors")
    assert not torch.equal(begun["proj.weight"], at_last_step(whole, "weights")["proj.weight"])
    # The bias starts where as many pairs are expected as there are.
    assert read_log(whole)[0]["bias"] == pytest.approx(-math.log(7))


def test_what_is_exported_is_the_average(lit):
    every = {"every_steps": 1, "keep_last": 6}
    done = run_pairs(lit("run", optim={"warmup_steps": 1, "ema": 0.5}, checkpoint=every), SILENT)
    folders = [done.path / "checkpoints" / f"step_{step:06d}" for step in range(7)]
    kept = [read_state(folder) for folder in folders]
    average = kept[0]["text.pos"].clone()
    for step in range(1, 7):
        decay = min(0.5, step / (9 + step))  # the first update is number 0
        average = decay * average + (1 - decay) * kept[step]["text.pos"]
        torch.testing.assert_close(kept[step]["average.text.pos"], average)
        exported = load_file(folders[step] / "text" / "model.safetensors")
        assert torch.equal(exported["pos"], kept[step]["average.text.pos"])
    assert not any(name.startswith("average.image") for name in kept[-1])


def read_state(folder):
    files = (folder / "state").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The findings of each of three processes."""
    folder = tmp_path_factory.mktemp("processes")
    run_ranks(run, 3, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["whole", "accumulated"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_of_any_number_of_processes_and_micro_batches_is_that_of_one(
    size, form, kind, processes
):
    one = gradients(World(), kind, [(0, 10)])
    assert {name.partition(".")[0] for name in one} >= {"image", "text", "scalar", "after", "loss"}
    for found in processes[:size]:
        together = found[size, form, kind]
        assert together.keys() == one.keys()
        for name, value in one.items():
            # AdamW's first update is nearly the sign of the gradient, which magnifies rounding.
            bound = 1e-9 if name.startswith("after.") else 1e-12
            torch.testing.assert_close(together[name], value, rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_of_processes_are_open_clips_with_distributed_gradients(kind, processes):
    open_clip_module("loss")
    for found in processes:
        ours, *ways = found["open_clip"][kind]
        assert len(ways) == len(OPEN_CLIP[kind])
        for theirs in ways:
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"kind": "siglip", "compute": {"recompute": True}},
        {"compute": {"accumulation": 2}},
        {
            "compute": {"accumulation": 2},
            "model": {"freeze": "image", "start": "M"},
            "data": {"pairs": "P", "cache": False},
        },
    ],
)
def test_the_arithmetic_of_a_step_is_what_torch_counts(sections):
    config = pairs_config("RUN", schedule={"steps": 1, "batch_size": 10}, **sections)
    state, batch = new_state(config, World()), random_batch()
    parts = [rows(batch, 0, 10)]
    if config.compute.accumulation > 1:
        parts = [rows(batch, 0, 4), rows(batch, 4, 10)]
    total = counted(lambda: backward(state, parts, 10, config))
    assert total == 10 * pair_flops(config, state.texts.trunk.config, batch.ids.shape[1])


def test_the_scale_is_clamped_and_no_scalar_decays():
    config = pairs_config("RUN", kind="siglip", optim={"weight_decay": 0.5, "lr": 10.0})
    state = new_state(config, World())
    by_parameter = {
        id(parameter): group["weight_decay"]
        for group in state.optimizer.param_groups
        for parameter in group["params"]
    }
    trained = dict(state.iterate_trained())
    assert by_parameter.keys() == {id(parameter) for parameter in trained.values()}
    decays = {name for name, parameter in trained.items() if by_parameter[id(parameter)]}
    assert "text.token.weight" in decays
    assert not decays & {"scalar.log_scale", "scalar.bias", "text.pos", "image.cls"}
    pair_step(state, [rows(random_batch(), 0, 10)], 10, config)
    assert state.scalars["log_scale"].item() in (0.0, pytest.approx(math.log(100)))


def test_a_caption_is_drawn_by_seed_and_position(pairs):
    opened = open_pairs(pairs_config("RUN", pairs))
    assert len(opened) == NUM_IMAGES - 1
    two = next(
        row
        for row in range(len(opened))
        if len(opened.captions.of(int(opened.caption_rows[row]))) == 2
    )
    at, positions = np.full(400, two), np.arange(400)
    drawn = opened.draw(at, positions, 0)
    assert set(drawn) == set(opened.captions.of(int(opened.caption_rows[two])))
    assert 150 < drawn.count(drawn[0]) < 250
    assert opened.draw(at[7:9], positions[7:9], 0) == drawn[7:9]
    assert opened.draw(at, positions, 1) != drawn


def test_cropped_images_come_with_their_own_captions(pairs):
    config = pairs_config("RUN", pairs, schedule={"steps": 2, "batch_size": 39})
    opened = open_pairs(config)
    tokens = CaptionTokens(open_tokenizer(config.text), trims=True)
    reader = PairReader(opened, tokens, None, config, Processes(World(), torch.device("cpu")))
    texts_of = {opened.entries[row].key: row for row in range(len(opened))}
    with reader.open(1) as steps:
        (step,) = steps
    (part,) = step.parts
    assert (step.step, sorted(part.keys)) == (1, sorted(texts_of))
    own = np.array([texts_of[key] for key in part.keys])
    assert torch.equal(part.ids, tokens.ids(opened.draw(own, part.positions, config.seed)))
    _, expected = locate(part.positions, (39,), (1.0,), config.seed)
    assert own.tolist() == expected.tolist()
    assert part.ids.shape[1] < config.text.context_length


def test_cached_views_are_the_crops_of_the_first_epochs_and_come_again(
    lit, two_tower_model, tmp_path, monkeypatch
):
    """Three epochs of three steps, of which the first two are cached; one image is damaged."""
    damaged = tmp_path / "pairs"
    shutil.copytree(lit("x").data.pairs, damaged)
    next(iter(sorted(damaged.rglob("*.png")))).write_bytes(b"no image")
    fixed = {
        "schedule": {"steps": 9, "batch_size": 13},
        "augment": {"min_area": 0.3, "contrast": 0.5},
    }
    live = run_pairs(lit("live", data={"pairs": str(damaged), "cache": False}, **fixed), SILENT)
    data = {"pairs": str(damaged), "cached_views": 2}
    original = cached_views._embed_view

    def struck_view(*arguments):
        if arguments[3] == 1:
            raise ConnectionError
        return original(*arguments)

    monkeypatch.setattr(cached_views, "_embed_view", struck_view)
    with pytest.raises(ConnectionError):
        run_pairs(lit("cached", data=data, **fixed), SILENT)
    first = (tmp_path / "cached-views.partial" / "view-00000.npy").read_bytes()
    monkeypatch.undo()
    cached = run_pairs(lit("cached", data=data, **fixed), SILENT)
    assert (tmp_path / "cached-views" / "view-00000.npy").read_bytes() == first
    of_cached, of_live = (
        [line["positive_cosine"] for line in read_log(run)] for run in (cached, live)
    )
    assert of_cached[:6] == pytest.approx(of_live[:6], rel=1e-4)
    assert of_cached[6:] != pytest.approx(of_live[6:], rel=1e-4)
    assert cached.summary["skipped_samples"] == live.summary["skipped_samples"] == 3
    rows = [np.load(tmp_path / "cached-views" / f"view-0000{view}.npy") for view in (0, 1)]
    assert [int(np.isnan(each[:, 0]).sum()) for each in rows] == [1, 1]
    assert not np.allclose(*rows, equal_nan=True)
    parents = {parent.role for parent in cached.parents}
    assert parents == {"images", "start", "embeddings"}


def test_both_towers_go_on_from_weights(pairs, two_tower_model, tmp_path):
    model = {**LIT, "freeze": 0, "start": str(two_tower_model), "activation": "quick_gelu"}
    fields = {"text": {"start": str(two_tower_model)}, "model": model}
    config = pairs_config(tmp_path / "run", pairs, **fields)
    done = run_pairs(config, SILENT)
    first = load_file(done.path / "checkpoints" / "step_000000" / "text" / "model.safetensors")
    start = load_file(two_tower_model / "text" / "model.safetensors")
    assert all(torch.equal(first[name], tensor) for name, tensor in start.items())
    assert read_log(done)[0]["scale"] == pytest.approx(math.exp(2.0))
    assert {parent.role for parent in done.parents} == {"images", "start", "text"}


def test_embeddings_of_another_model_are_refused(lit, pairs, tmp_path):
    from mlcd.encoders import open_encoder

    embed(open_source(str(pairs)), open_encoder("pixels"), tmp_path / "other", SILENT)
    with pytest.raises(ConfigInvalid, match="but are by another model"):
        run_pairs(lit("run", data={"embeddings": str(tmp_path / "other")}), SILENT)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"freeze": "tower", "start": "M"}}, "must be a number or image"),
        ({"model": {"freeze": "image"}}, "requires model.start"),
        ({"data": {"cache": False}}, "data.cache=false requires"),
        ({"data": {"embeddings": "E"}}, "data.embeddings requires"),
        ({"data": {"cached_views": 2}}, "data.cached_views requires"),
        (
            {"model": {"freeze": "image", "start": "M"}, "augment": {"flip": 0}},
            "augment requires data.cached_views",
        ),
        ({"optim": {"center_lr": 0.9}}, "optim.center_lr requires"),
        ({"compute": {"backbone": "fsdp"}}, "must be ddp for pairs"),
        ({"loss": {"bias": 1.0}}, "loss.bias requires loss.kind=siglip, got clip"),
        ({"text": {"start": "M", "width": 32}}, "which sets it"),
        ({"schedule": {"batch_size": 1}}, "at least 2"),
        ({"evaluation": {"knn": True}}, "unknown key evaluation"),
    ],
)
def test_settings_without_effect_are_refused(sections, message):
    with pytest.raises(ConfigInvalid, match=message):
        pairs_config("RUN", **{**sections, "data": {"pairs": "P", **sections.get("data", {})}})


def test_a_batch_larger_than_the_data_is_refused(pairs, tmp_path):
    config = pairs_config(tmp_path / "run", pairs, schedule={"steps": 1, "batch_size": 40})
    with pytest.raises(ConfigInvalid, match="at most the 39 images with captions, got 40"):
        run_pairs(config, SILENT)


def test_data_of_which_all_is_held_out_is_refused(pairs, tmp_path):
    with pytest.raises(ConfigInvalid, match="leaves no image with a caption"):
        open_pairs(pairs_config(tmp_path, pairs, data={"pairs": str(pairs), "hold_out": 0.999}))


def test_the_manifest_names_what_the_run_was_made_from(lit):
    done = run_pairs(lit("run", schedule={"steps": 1}), SILENT)
    manifest = json.loads((done.path / "manifest.json").read_text())
    assert [parent["role"] for parent in manifest["parents"]] == ["images", "start", "embeddings"]
    assert len(manifest["config"]["captions"]) == len(manifest["config"]["tokenizer"]) == 64


@pytest.mark.parametrize("cache", [True, False])
def test_a_run_has_seen_its_images_with_captions(lit, pairs, tmp_path, cache):
    """Their digests are those of the embeddings that it read, or of the images as they lie."""
    images = shutil.copytree(pairs, tmp_path / "images")
    config = lit("run", schedule={"steps": 1}, data={"pairs": str(images), "cache": cache})
    checkpoint = open_artifact(find_checkpoint(run_pairs(config, SILENT).path))
    seen = find_seen(checkpoint)
    files = sorted(images.rglob("*.png"))
    expected = {hashlib.sha256(file.read_bytes()).digest() for file in files[:-1]}
    assert {row.tobytes() for row in seen.trained} == expected
    assert not len(seen.clustered)
    assert seen.unknown == ("what the weights theirs were trained on",)
    shutil.copy(files[0], files[0].with_name("more.png"))
    assert any(
        "other images than when the run started" in each for each in find_seen(checkpoint).unknown
    )
