"""Runs that start from weights: those of another run, an export, transformers and open_clip."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    MLCDVisionConfig,
    MLCDVisionModel,
)

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import open_artifact
from mlcd.errors import ConfigInvalid, NotFound
from mlcd.images.transform import PreprocessSpec
from mlcd.models.checkpoints import write_state
from mlcd.models.configs import write_hf_preprocessing
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT, ViTConfig
from mlcd.models.zoo import load
from mlcd.pipelines.verify import verify
from mlcd.training.config import load_config
from mlcd.training.evaluation.seen import find_seen
from mlcd.training.pairs.pairs_config import load_any_config
from mlcd.training.run.run_training import run_training
from tests.unit.training.running import SILENT, before_step, configured, read_log

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOWER = ViTConfig(32, 8, 32, 2, 2, 64, 16, activation="quick_gelu")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "continue.yaml"
    path.write_text(
        "schedule: {steps: 4, batch_size: 16}\n"
        "optim: {warmup_steps: 0}\n"
        "loss: {labels_per_image: 2}\n"
        "checkpoint: {every_steps: 2, keep_last: 9}\n"
        "log_every: 1\n"
        "telemetry: {peak_tflops: 1}\n"
    )
    return path


@pytest.fixture
def continued(recipe, labeled, digits, tmp_path):
    def make(out, start, *overrides):
        labels, started = labeled / "labels", f"model.start={start}"
        return configured(recipe, digits, labels, tmp_path / out, started, *overrides)

    return make


@pytest.fixture
def scratch(recipe, labeled, digits, tmp_path):
    """A run of random weights, with rotary positions and without a projection if asked for."""

    def make(out, *overrides):
        sizes = {name: value for name, value in TOWER.to_dict().items() if name != "pooling"}
        labels, model = labeled / "labels", f"model={json.dumps(sizes)}"
        return configured(recipe, digits, labels, tmp_path / out, model, *overrides)

    return make


def write_open_clip(folder, seed=1):
    trunk = ViT(TOWER)
    trunk.initialize(torch.Generator().manual_seed(seed))
    state = write_state(trunk.state_dict(), "open_clip")
    theirs = {f"visual.{name}": each.clone() for name, each in state.items()}
    folder.mkdir()
    save_file(theirs, folder / "open_clip_model.safetensors")
    vision = {
        "image_size": 32,
        "patch_size": 8,
        "width": 32,
        "layers": 2,
        "head_width": 16,
        "mlp_ratio": 2.0,
    }
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    config = {
        "model_cfg": {"embed_dim": 16, "quick_gelu": True, "vision_cfg": vision},
        "preprocess_cfg": {"mean": mean, "std": std, "size": 32},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


def write_hf(folder, kind="clip"):
    torch.manual_seed(3)
    fields = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    model = (
        CLIPVisionModelWithProjection(CLIPVisionConfig(**fields, projection_dim=16))
        if kind == "clip"
        else MLCDVisionModel(MLCDVisionConfig(**fields))
    )
    model.save_pretrained(folder)
    spec = PreprocessSpec(32, 32)
    (folder / "preprocessor_config.json").write_text(json.dumps(write_hf_preprocessing(spec)))
    return folder


def pictures(side=32):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (5, 3, side, side), generator=generator, dtype=torch.uint8)


def at_step(run, step):
    return Servable.read(run.path / "checkpoints" / f"step_{step:06d}" / "weights")


@pytest.mark.parametrize("kind", ["clip", "mlcd", "open_clip"])
def test_step_0_embeds_like_its_source(kind, continued, tmp_path):
    source = tmp_path / kind
    (write_open_clip if kind == "open_clip" else write_hf)(
        source, *([kind] if kind == "mlcd" else [])
    )
    config = continued("run", source)
    run = run_training(config, SILENT)
    theirs, first, last = load(str(source)), at_step(run, 0), at_step(run, 4)
    assert (first(pictures()) - theirs(pictures())).abs().max() <= 1e-6
    assert (last(pictures()) - theirs(pictures())).abs().max() > 1e-3
    # Pixels are prepared as the source says, and the recipe that is saved says what was trained.
    assert first.preprocess == theirs.preprocess
    assert config.model.vit() == theirs.trunk.config
    assert any(parent.role == "weights" for parent in run.parents)
    seen = find_seen(open_artifact(run.path / "checkpoints" / "step_000000"))
    assert seen.unknown == (f"what the weights {kind} were trained on",)
    for made in (run.path, run.path / "checkpoints" / "step_000004"):
        assert [found.checked for found in verify(made) if found.kind == "weights"] == [True]


def test_a_run_goes_on_from_another_with_its_head_where_the_classes_agree(
    continued, scratch, tmp_path
):
    first = run_training(scratch("first"), SILENT)
    again = run_training(continued("again", first.path), SILENT)
    assert torch.equal(at_step(first, 4)(pictures()), at_step(again, 0)(pictures()))
    kept, given = (
        Centers.open(run.path / "checkpoints" / f"step_{step:06d}" / "centers").vectors
        for run, step in ((first, 4), (again, 0))
    )
    assert np.abs(kept - given).max() < 1e-6
    new = run_training(continued("new", first.path, "model.head=new"), SILENT)
    drawn = Centers.open(new.path / "checkpoints" / "step_000000" / "centers").vectors
    assert np.abs(drawn - kept).max() > 0.1
    assert [parent.role for parent in new.parents] == ["labels", "images", "start"]
    list(verify(new.path))
    # What the first run has seen, the second one has seen at its step 0.
    seen = [
        find_seen(open_artifact(run.path / "checkpoints" / f"step_{step:06d}")).trained
        for run, step in ((first, 0), (first, 4), (again, 0))
    ]
    assert [len(each) for each in seen] == [0, len(seen[1]), len(seen[1])]
    assert len(seen[1]) > 100


def test_the_head_of_other_classes_is_refused_by_name_or_left(continued, scratch, labeled):
    first = run_training(scratch("first"), SILENT)
    checkpoint = first.path / "checkpoints" / "step_000004"
    manifest = open_artifact(checkpoint / "centers")
    assert manifest.config["classes"] == Centers.open(labeled / "centers").digest
    source = checkpoint / "weights"
    with pytest.raises(ConfigInvalid, match="was not trained on the classes of"):
        run_training(continued("other", write_hf(source.parent / "hf"), "model.head=kept"), SILENT)


def test_a_contradiction_with_the_recipe_names_the_key(continued, tmp_path):
    source = write_hf(tmp_path / "clip")
    with pytest.raises(ConfigInvalid, match=r"model.width=64, but the weights at .* have 32"):
        continued("run", source, "model.width=64")
    with pytest.raises(ConfigInvalid, match=r"model.activation=gelu"):
        continued("run", source, "model.activation=gelu")
    with pytest.raises(ConfigInvalid, match="must be a multiple of the patch size"):
        continued("run", source, "model.image_size=36")
    sizes = {name: value for name, value in TOWER.to_dict().items() if name != "pooling"}
    stated = continued("run", source, f"model={json.dumps({**sizes, 'start': str(source)})}")
    assert stated.model.vit() == TOWER
    sizes["depth"] = 3
    stated = continued("run", source, f"model={json.dumps({**sizes, 'start': str(source)})}")
    with pytest.raises(ConfigInvalid, match=r"model\.depth=3"):
        run_training(stated, SILENT)


def test_what_cannot_be_trained_is_refused_by_name(continued, tmp_path):
    with pytest.raises(ConfigInvalid, match="is an ONNX graph"):
        continued("run", tmp_path / "model.onnx")
    with pytest.raises(NotFound, match="does not exist"):
        continued("run", tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["clip", "mlcd"])
def test_another_resolution_is_that_of_transformers(kind, continued, tmp_path):
    """CLIP's positions are interpolated as transformers does it, and rotary ones follow the grid."""
    source = write_hf(tmp_path / kind, kind)
    run = run_training(continued("run", source, "model.image_size=48"), SILENT)
    ours = at_step(run, 0)
    assert (ours.preprocess.crop, ours.preprocess.resize_shortest) == (48, 48)
    pixels = ours.normalize(pictures(48))
    if kind == "clip":
        theirs = CLIPVisionModelWithProjection.from_pretrained(source)
        expected = theirs(pixels, interpolate_pos_encoding=True).image_embeds
    else:
        expected = MLCDVisionModel.from_pretrained(source)(pixels).pooler_output
    assert (ours.trunk(pixels) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("frozen", [1, 2, "tower"])
def test_what_is_frozen_stays_bit_for_bit(frozen, scratch):
    tower = ["model.positions=rope", "model.registers=2"]
    run = run_training(scratch("run", f"model.freeze={frozen}", *tower), SILENT)
    first, last = (at_step(run, step).trunk.state_dict() for step in (0, 4))
    before = {"patch.weight", "cls", "registers", "rope.cls_angle", "norm_pre.weight"}
    before.add("norm_pre.bias")
    for name, tensor in first.items():
        block = int(name.split(".")[1]) if name.startswith("blocks.") else None
        stays = frozen == "tower" or name in before or (block is not None and block < frozen)
        assert torch.equal(tensor, last[name]) is stays, name
    centers = [
        Centers.open(run.path / "checkpoints" / f"step_{step:06d}" / "centers").vectors
        for step in (0, 4)
    ]
    assert not np.array_equal(*centers)


@pytest.mark.parametrize(
    "options",
    [
        ["model.positions=rope", "model.embedding_dim=null", "model.registers=2"],
        ["optim.ema=0.9", "optim.layer_decay=0.6", "model.drop_path=0.3", "model.freeze=1"],
    ],
)
def test_an_interrupted_run_ends_with_the_same_bits(options, scratch, monkeypatch):
    whole = run_training(scratch("whole", *options), SILENT)
    with monkeypatch.context() as struck:
        before_step(struck, 2, lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_training(scratch("parts", *options), SILENT)
    again = run_training(scratch("parts", *options), SILENT)
    assert whole.digest == again.digest
    assert [line["loss"] for line in read_log(whole)] == [line["loss"] for line in read_log(again)]


def test_what_is_exported_is_the_average(scratch):
    run = run_training(scratch("run", "optim.ema=0.5", "checkpoint.every_steps=1"), SILENT)
    folder = run.path / "checkpoints"
    stored = [
        load_file(folder / f"step_{step:06d}" / "state" / "model.safetensors")
        if (folder / f"step_{step:06d}" / "state" / "model.safetensors").is_file()
        else _all_tensors(folder / f"step_{step:06d}" / "state")
        for step in range(5)
    ]
    average = stored[0]["trunk.proj.weight"].clone()
    for step in range(1, 5):
        decay = min(0.5, step / (9 + step))  # the first update is number 0
        average = decay * average + (1 - decay) * stored[step]["trunk.proj.weight"]
        exported = at_step(run, step).trunk.proj.weight
        assert torch.allclose(exported, average, atol=1e-7)
        assert torch.equal(exported, stored[step]["average.proj.weight"])
    assert run.fingerprint == at_step(run, 4).fingerprint()


def _all_tensors(folder):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.freeze=3"], "at most the tower's 2 blocks"),
        (["model.freeze=tower", "optim.ema=0.9"], "optim.ema has no effect"),
        (["model.head=kept"], "model.head requires model.start"),
        (["model.like=NAME"], "model.like requires model.start"),
    ],
)
def test_dead_options_are_refused(options, message, scratch):
    with pytest.raises(ConfigInvalid, match=message):
        scratch("run", *options)


def test_a_layer_s_rate_falls_from_the_last_to_the_first():
    from mlcd.training.optim.groups import parameter_groups
    from mlcd.training.optim.optim_config import OptimConfig

    trunk = ViT(TOWER)
    groups = parameter_groups(trunk, OptimConfig(lr=1.0, layer_decay=0.5))
    rates = {id(each): group["peak_lr"] for group in groups for each in group["params"]}
    found = {name: rates[id(each)] for name, each in trunk.named_parameters()}
    assert (found["proj.weight"], found["norm_post.bias"]) == (1.0, 1.0)
    assert (found["blocks.1.attn.qkv.weight"], found["blocks.0.norm1.weight"]) == (0.5, 0.25)
    assert (found["patch.weight"], found["pos"], found["norm_pre.bias"]) == (0.125,) * 3


def test_branches_are_left_out_as_often_as_asked_and_for_any_process_alike():
    from mlcd.training.data.drop_path import branch_scales
    from mlcd.training.tower_config import TowerConfig

    config = TowerConfig(
        image_size=8, patch_size=4, width=8, depth=3, heads=1, mlp_width=8, embedding_dim=4,
        drop_path=0.4, freeze=1,
    )  # fmt: skip
    positions = np.arange(40_000)
    scales = branch_scales(config, positions, seed=1)
    assert scales.shape == (3, 2, 40_000)
    assert (scales[0] == 1).all()
    for block, rate in ((1, 0.2), (2, 0.4)):
        left_out = (scales[block] == 0).double().mean(dim=1)
        assert left_out.tolist() == pytest.approx([rate, rate], abs=0.015)
        assert scales[block].max() == pytest.approx(1 / (1 - rate))
    assert torch.equal(branch_scales(config, positions[7:9], seed=1), scales[:, :, 7:9])


@torch.no_grad()
def test_a_left_out_branch_adds_nothing():
    trunk = ViT(TOWER)
    trunk.initialize(torch.Generator().manual_seed(0))
    x = torch.randn((3, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    kept, dropped = torch.ones((2, 2, 3)), torch.zeros((2, 2, 3))
    assert torch.allclose(trunk(x, None, kept), trunk(x), atol=1e-6)
    only_norms = trunk.proj(
        trunk.norm_post(trunk.norm_pre(trunk.cls.expand(3, 1, -1) + trunk.pos[:1])[:, 0])
    )
    assert torch.allclose(trunk(x, None, dropped), only_norms, atol=1e-6)


@pytest.mark.parametrize("recipe", ["smoke", "small", "demo-digits", "mlcd-vit-b32-continue"])
def test_a_built_in_recipe_takes_the_shape_of_the_weights(recipe, tmp_path):
    write_open_clip(tmp_path / "weights")
    places = ["data.images=I", "data.labels=L", "out=OUT", f"model.start={tmp_path / 'weights'}"]
    assert load_config(recipe, places).model.vit() == TOWER
    assert load_config(recipe, [*places, "model.image_size=48"]).model.image_size == 48
    with pytest.raises(
        ConfigInvalid, match=r"model\.positions=rope, but the weights at .* have learned"
    ):
        load_config(recipe, [*places, "model.positions=rope"])


def test_a_recipe_of_a_resolution_keeps_it_and_one_of_one_s_own_is_compared(tmp_path):
    write_open_clip(tmp_path / "weights")
    places = ["data.images=I", "data.labels=L", "out=OUT", f"model.start={tmp_path / 'weights'}"]
    assert load_config("stage2-336", places).model.image_size == 336
    own = tmp_path / "own.yaml"
    own.write_text("model: {width: 96}\nschedule: {steps: 90}\n")
    with pytest.raises(ConfigInvalid, match=r"model\.width=96, but the weights"):
        load_config(str(own), places)


@pytest.mark.parametrize("recipe", ["clip", "siglip"])
def test_a_built_in_recipe_of_pairs_takes_the_shape_of_the_weights(recipe, tmp_path):
    write_open_clip(tmp_path / "weights")
    start = f"model.start={tmp_path / 'weights'}"
    config = load_any_config(recipe, ["data.pairs=P", "out=OUT", start, "text.start=TEXT"])
    assert config.model.vit() == TOWER
    assert config.text.start == "TEXT"
