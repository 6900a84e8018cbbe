"""`mlcd plan`: its figures against arithmetic by hand, and what it refuses."""

import json
from typing import get_args

import pytest

from mlcd.commands.plan_scale import _INDEXES
from mlcd.indexes.faiss import Kind
from mlcd.scale.machine_rates import Rates
from mlcd.scale.stages import INDEX_BYTES, PlannedWork, stages
from tests.conftest import call_mlcd

RATES = Rates(images_per_s=100, image_bytes=1000, products_per_s=1e9, network_bytes_per_s=1e9)
GIVEN = ("plan", "--images", 1000, "--clusters", 10, "--images-per-s", 100, "--tflops", 0.001)


def test_stages_cost_what_the_formulas_say():
    work = PlannedWork(images=10_000, clusters=100, dimension=50, machines=2, epochs=3)
    found = {stage.name: stage for stage in stages(work, RATES)}
    assert list(found) == ["embed", "cluster", "label", "train", "collection, ivf-sq8"]
    assert found["embed"].seconds == 10_000 / 200
    assert found["embed"].network_bytes == 10_000_000
    products = 2 * 10_000 * 100 * 50
    assert found["label"].seconds == pytest.approx(products / 2e9)
    sums = 2 * 8 * 100 * 50 * 4 / 1e9
    assert found["cluster"].seconds == pytest.approx(4 * products / 2e9 + sums)
    each = 3 / 100 + 2 * 4 * 10 * 50 / 1e9
    assert found["train"].seconds == pytest.approx(3 * 10_000 * each / 2)
    assert found["collection, ivf-sq8"].memory_bytes == 10_000 * (50 + 8) / 2


def test_reading_decides_where_the_network_is_slow():
    slow = Rates(images_per_s=100, image_bytes=1000, products_per_s=1e9, network_bytes_per_s=1e3)
    embed = next(stages(PlannedWork(images=10, clusters=2, dimension=4, machines=1), slow))
    assert embed.seconds == 10
    assert "bytes/s" in embed.formula


def test_the_indexes_are_those_of_collections():
    assert get_args(Kind) == _INDEXES == tuple(INDEX_BYTES)


def test_the_command_measures_its_sample(digits):
    facts = json.loads(
        call_mlcd("plan", "--images", 1000, "--clusters", 10, "--model", "hog",
                  "--sample", digits, "--json").stdout
    )  # fmt: skip
    assert facts["rates"]["images_per_s"] > 0
    assert 100 < facts["rates"]["image_bytes"] < 10_000
    assert facts["sources"] == {
        "images a second": "measured here with hog, decoding included",
        "products": "measured here",
    }
    assert facts["work"]["dimension"] == 1764


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GIVEN[:5], "--tflops", 1), "give --model with --sample, or --images-per-s"),
        ((*GIVEN, "--model", "hog"), "give --model with --sample, or --images-per-s"),
        (GIVEN, "give --dimension, or --model with --sample"),
        ((*GIVEN, "--dimension", 0), "0 is not in the range"),
        ((*GIVEN, "--dimension", 8, "--network-gbit", "nan"), "network-gbit"),
        ((*GIVEN, "--dimension", 8, "--hour-price", "inf"), "hour-price"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, message):
    result = call_mlcd(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
