import pytest

from mlcd.errors import ConfigInvalid
from training.config import LossConfig, built_in_recipes, load_config

PLACES = ["data.images=i", "data.labels=l", "out=o"]


@pytest.mark.parametrize("recipe", built_in_recipes())
def test_every_built_in_recipe_is_valid_and_states_what_it_costs(recipe):
    load_config(recipe, PLACES)
    from importlib import resources

    text = (resources.files("training") / "recipes" / f"{recipe}.yaml").read_text()
    for promise in ("command:", "hardware:", "time:", "expected:"):
        assert promise in text


def test_overrides_reach_nested_keys():
    config = load_config("demo-digits", [*PLACES, "optim.lr=3e-4", "loss.kind=mlc", "model.width=48"])
    assert (config.optim.lr, config.loss.kind, config.model.width) == (3e-4, "mlc", 48)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rate=1", "unknown key optim.learning_rate"),
        ("loss.margn=0.1", "did you mean loss.margin"),
        ("optim.lr=-1", r"optim.lr=-1: .*greater than 0"),
        ("optim.lr", "section.key=value"),
        ("seed.x=1", "a value, not a section"),
    ],
)
def test_a_wrong_override_is_refused_with_a_hint(override, message):
    with pytest.raises(ConfigInvalid, match=message):
        load_config("demo-digits", ["seed=1", *PLACES, override])


def test_missing_places_are_named():
    with pytest.raises(ConfigInvalid, match=r"data\.images is not set|out is not set|data is not set"):
        load_config("demo-digits", [])


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ConfigInvalid, match="demo-digits"):
        load_config("no-such-recipe")


def test_scale_and_ratio_follow_the_number_of_classes():
    loss = LossConfig()
    assert (loss.resolved_scale(100), loss.resolved_ratio(100)) == (16.0, 1.0)
    assert (loss.resolved_scale(10**6), loss.resolved_ratio(10**6)) == (64.0, 0.1)
    assert LossConfig(scale=8).resolved_scale(10**6) == 8


def test_places_are_no_part_of_a_run_s_identity():
    first, second = (load_config("demo-digits", ["data.labels=l", f"data.images={x}", f"out={x}"]) for x in "ab")
    assert first.identity() == second.identity()
    assert load_config("demo-digits", [*PLACES, "seed=1"]).identity() != first.identity()
