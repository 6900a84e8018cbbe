import json
import math
import re
import shlex
from importlib import resources

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mlcd.errors import ConfigInvalid
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.models.vit import ViT, ViTConfig
from mlcd.training.cli import train
from mlcd.training.config import load_config, validate_config
from mlcd.training.head.loss_config import LossConfig
from mlcd.training.pairs.pairs_config import load_any_config
from mlcd.training.recipe import list_recipes
from mlcd.training.run.any_run import choose_algorithms, is_deterministic
from tests.unit.training.running import VIEWS

PLACES = ["data.images=i", "data.labels=l", "out=o"]


def header(recipe):
    """Returns a recipe's statements about itself: {"command": …, "hardware": …, …}."""
    text = (resources.files("mlcd.training") / "recipes" / f"{recipe}.yaml").read_text()
    return dict(re.findall(r"^# (\w+): +(.+)$", text, flags=re.MULTILINE))


@pytest.fixture(autouse=True)
def a_start(tmp_path, monkeypatch):
    """A small tower that the recipes without sizes start from, where commands look for it."""
    trunk = ViT(ViTConfig(28, 14, 32, 2, 2, 64, 16))
    trunk.initialize(torch.Generator().manual_seed(0))
    for name in ("RUN", "MODEL"):
        (tmp_path / name).mkdir()
        Servable(trunk, PreprocessSpec(28, 28)).write(tmp_path / name)
    monkeypatch.chdir(tmp_path)


def places(recipe):
    """Returns what a recipe has to be told."""
    words = shlex.split(header(recipe)["command"])
    own = [word for word in words if word.startswith(("model.start=", "data.pairs="))]
    return [*(PLACES[-1:] if "data.pairs" in str(own) else PLACES), *own]


PLANNED = [recipe for recipe in list_recipes() if "plan" in header(recipe)]


@pytest.mark.parametrize("options", [(), ("loss.margin_kind=none",), ("loss.kind=cd",), VIEWS])
def test_a_saved_configuration_is_read_again(options):
    config = load_config("demo-digits", [*PLACES, "model.patch_size=8", *options])
    assert validate_config(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize("recipe", list_recipes())
def test_every_built_in_recipe_is_valid_and_states_what_it_costs(recipe):
    load_any_config(recipe, places(recipe))
    assert {"command", "hardware", "time", "expected"} <= header(recipe).keys()


@pytest.mark.parametrize("recipe", list_recipes())
def test_the_command_in_a_recipe_s_header_is_one(recipe):
    program, command, name, *overrides = shlex.split(header(recipe)["command"])
    assert (program, command, name) == ("mlcd", "train", recipe)
    config = load_any_config(name, overrides)
    assert config.out == "OUT" if config.model.start else config.out == "RUN"


def test_the_larger_recipes_tell_how_their_time_was_computed():
    assert {"mlcd-vit-b32-continue", "smoke", "small", "vit-b32-1m", "vit-l14-1m"} == set(PLANNED)


@pytest.mark.parametrize("recipe", PLANNED)
def test_the_hours_in_a_recipe_s_header_are_those_of_its_plan(recipe):
    program, command, *arguments = shlex.split(header(recipe)["plan"])
    assert (program, command, arguments[0]) == ("mlcd", "train", recipe)
    result = CliRunner().invoke(train, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    stated = re.match(r"([\d.]+) hours by the plan", header(recipe)["time"])
    assert json.loads(result.output)["seconds"] / 3600 == pytest.approx(float(stated[1]), rel=0.15)


@pytest.mark.parametrize(
    ("recipe", "depth", "dimension", "lr"),
    [("vit-b32-1m", 12, 512, 5e-4), ("vit-l14-1m", 24, 768, 4e-4)],
)
def test_the_paper_s_recipes_hold_the_paper_s_settings(recipe, depth, dimension, lr):
    # method.md sections 6, 9.1 and 10.
    config = load_config(recipe, PLACES)
    assert (config.model.depth, config.model.embedding_dim) == (depth, dimension)
    assert config.schedule.steps * config.schedule.batch_size == 32 * 400_000_000
    loss, optim = config.loss, config.optim
    assert (loss.kind, loss.labels_per_image, loss.negative_ratio, loss.margin_kind) == (
        "mlcd",
        8,
        0.1,
        "arcface",
    )
    assert (loss.scale, loss.margin, loss.policy) == (64, 0.3, "independent")
    # Table 9, and what the paper leaves out by CLIP, as its Table 9 and "same augmentation as CLIP"
    # do.
    assert (optim.lr, optim.weight_decay, optim.warmup_steps) == (lr, 0.2, 2000)
    assert (optim.betas, optim.eps, optim.center_lr) == ((0.9, 0.98), 1e-6, None)
    assert (config.augment.min_area, config.augment.max_aspect, config.augment.flip) == (
        0.9,
        pytest.approx(4 / 3),
        0,
    )
    assert config.data.hold_out == 0
    assert config.compute.precision == "bf16"


def test_what_stands_in_for_missing_places_gives_way_to_what_is_given():
    fallback = {"out": "RUN", "data": {"images": "I", "labels": "L"}}
    config = load_config("demo-digits", [], fallback=fallback)
    assert (config.out, config.data.images) == ("RUN", "I")
    config = load_config("demo-digits", PLACES, fallback=fallback)
    assert (config.out, config.data.images) == ("o", "i")


def test_what_stands_in_fills_sections_that_are_given_in_part():
    fallback = {"out": "RUN", "data": {"images": "I", "labels": "L"}}
    config = load_config("demo-digits", ["data.hold_out=0.1"], fallback=fallback)
    assert (config.data.images, config.data.labels, config.data.hold_out) == ("I", "L", 0.1)
    mixed = load_config("demo-digits", ["data.mix=[{images: A, labels: B}]"], fallback=fallback)
    assert [source.images for source in mixed.data.sources] == ["A"]


def test_a_correction_that_would_undo_the_filter_is_refused():
    with pytest.raises(ConfigInvalid, match="set only one of them"):
        load_config(
            "demo-digits", [*PLACES, "loss.correct_ratio=true", "loss.filter_threshold=0.75"]
        )


def test_overrides_reach_nested_keys():
    config = load_config(
        "demo-digits", [*PLACES, "optim.lr=3e-4", "loss.kind=mlc", "model.width=48"]
    )
    assert (config.optim.lr, config.loss.kind, config.model.width) == (3e-4, "mlc", 48)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rate=1", r"unknown key optim.learning_rate: did you mean optim.lr\?"),
        (
            "schedule.epochs=3",
            r"did you mean schedule.steps \(epochs x images / schedule.batch_size\)",
        ),
        ("batch=8", "did you mean schedule.batch_size"),
        ("optim.batch_size=8", "did you mean schedule.batch_size"),
        ("optim.beta=0.9", "did you mean optim.betas"),
        ("schedule.zzz=1", r"known: schedule.steps, schedule.batch_size$"),
        ("loss.margn=0.1", "did you mean loss.margin"),
        ("optim.lr=-1", r"optim.lr=-1: .*greater than 0"),
        ("optim.lr", "section.key=value"),
        ("seed.x=1", "a value, not a section"),
        ("loss.drawn_from=4", r"loss.drawn_from must be more than the 4 labels per image"),
    ],
)
def test_a_wrong_override_is_refused_with_a_hint(override, message):
    with pytest.raises(ConfigInvalid, match=message):
        load_config("demo-digits", ["seed=1", *PLACES, override])


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (
            ["out=o"],
            "data.images, data.labels are not set: add data.images=VALUE data.labels=VALUE",
        ),
        (["data.images=i"], "out, data.labels are not set: add out=VALUE data.labels=VALUE"),
        (["out=o", "data.images=i"], "data.labels is not set: add data.labels=VALUE"),
    ],
)
def test_all_missing_places_are_named(given, missing):
    with pytest.raises(ConfigInvalid, match=f"^{re.escape(missing)}$"):
        load_config("demo-digits", given)


def test_the_missing_keys_of_a_recipe_of_one_s_own_are_named_and_not_their_sections(tmp_path):
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        "model: {image_size: 32, patch_size: 4, width: 64, depth: 2, heads: 2, mlp_width: 128}\n"
    )
    with pytest.raises(
        ConfigInvalid,
        match=r"^data.images, data.labels, model.embedding_dim, schedule.steps are not set",
    ):
        load_config(str(recipe), ["out=o"])


def test_a_misspelled_key_is_told_before_what_is_missing_without_it():
    with pytest.raises(ConfigInvalid, match=r"unknown key data.label: did you mean data.labels\?"):
        load_config("demo-digits", ["out=o", "data.images=i", "data.label=l"])


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ConfigInvalid, match="demo-digits"):
        load_config("no-such-recipe")


def test_scale_and_ratio_follow_the_number_of_classes():
    loss = LossConfig()
    assert (loss.resolve_scale(100), loss.resolve_ratio(100)) == (16.0, 1.0)
    assert (loss.resolve_scale(1000), loss.resolve_ratio(1000)) == (8.0, 1.0)
    assert (loss.resolve_scale(10**6), loss.resolve_ratio(10**6)) == (64.0, 0.1)
    assert LossConfig(kind="cd").resolve_scale(1000) == 16.0
    assert LossConfig(scale=8).resolve_scale(10**6) == 8


@pytest.mark.parametrize("kind", ["mlcd", "cd"])
def test_scale_and_negatives_have_no_cliff_between_few_classes_and_a_million(kind):
    loss = LossConfig(kind=kind)
    classes = np.unique(np.geomspace(500, 4e6, 2000).astype(int))
    negatives = np.array([loss.resolve_ratio(int(k)) * k for k in classes])
    scales = np.array([loss.resolve_scale(int(k)) for k in classes])
    steps = classes[1:] / classes[:-1]
    assert (np.diff(negatives) > -1e-6).all()  # more classes, not fewer negatives
    assert (negatives[1:] / negatives[:-1] <= steps * (1 + 1e-9)).all()
    assert (np.diff(scales) >= 0).all()
    assert (scales[1:] / scales[:-1] <= steps).all()
    assert (loss.resolve_scale(10_000), loss.resolve_ratio(10_000)) == (
        8.0 if kind == "mlcd" else 16.0,
        1.0,
    )
    assert loss.resolve_ratio(100_000) == pytest.approx(0.1)
    assert loss.resolve_scale(100_000) == pytest.approx(
        math.sqrt(64 * (8 if kind == "mlcd" else 16))
    )


def test_a_warm_up_longer_than_the_run_is_refused():
    load_config("demo-digits", [*PLACES, "schedule.steps=50"])
    with pytest.raises(
        ConfigInvalid, match=r"^optim.warmup_steps=50 is more than schedule.steps=49: "
    ):
        load_config("demo-digits", [*PLACES, "schedule.steps=49"])


def test_places_are_no_part_of_a_run_s_identity():
    first, second = (
        load_config("demo-digits", ["data.labels=l", f"data.images={x}", f"out={x}"]) for x in "ab"
    )
    assert first.identity() == second.identity()
    assert load_config("demo-digits", [*PLACES, "seed=1"]).identity() != first.identity()


@pytest.mark.parametrize(
    ("override", "cpu", "gpu"),
    [
        ("compute.deterministic=null", True, False),
        ("compute.deterministic=true", True, True),
        ("compute.deterministic=false", False, False),
    ],
)
def test_determinism_is_a_choice_which_a_gpu_makes_against_it(override, cpu, gpu):
    config = load_config("smoke", [*PLACES, override])
    found = [is_deterministic(config, torch.device(name)) for name in ("cpu", "cuda")]
    assert found == [cpu, gpu]


@pytest.mark.parametrize(("device", "only_warns"), [("cpu", True), ("cuda", False)])
def test_on_a_gpu_what_has_no_deterministic_algorithm_is_refused(device, only_warns):
    """After a mere warning attention would sum in any order."""
    config = load_config("smoke", [*PLACES, "compute.deterministic=true"])
    try:
        choose_algorithms(config, torch.device(device))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == only_warns
    finally:
        torch.use_deterministic_algorithms(False)
