"""`mlcd plan`: its figures against arithmetic by hand, and what it refuses."""

import json
from pathlib import Path
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


def test_a_given_rate_of_training_counts_and_not_three_passes():
    fast = Rates(
        images_per_s=100, image_bytes=1, products_per_s=1e9, network_bytes_per_s=1e9,
        train_images_per_s=200,
    )  # fmt: skip
    work = PlannedWork(images=1000, clusters=10, dimension=4, machines=1, epochs=2)
    train = next(stage for stage in stages(work, fast) if stage.name == "train")
    assert train.seconds == pytest.approx(2000 * (1 / 200 + 2 * 4 * 1 * 4 / 1e9))
    assert "1 / 200 images/s" in train.formula


PAPER = (
    "plan", "--images", 400_000_000, "--clusters", 1_000_000, "--dimension", 768, "--machines", 8,
    "--images-per-s", 4000, "--tflops", 1600, "--network-gbit", 100, "--epochs", 1,
    "--hour-price", 30, "--month-price", ".02",
)  # fmt: skip


def test_the_page_shows_what_the_command_says():
    """Every figure of the page's table, which were worked out by hand once, is the command's."""
    said = call_mlcd(*PAPER).stdout
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "scale.md").read_text()
    asked = " ".join(map(str, PAPER)).removeprefix("plan ")
    assert asked in " ".join(page.replace("\\\n", " ").split())
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    for row, line in zip(
        [row for row in rows if ":" in row[1]], said.splitlines()[1:6], strict=True
    ):
        for figure in filter(None, map(str.strip, row[1:5])):
            assert f"  {figure}" in line, (figure, line)
    assert "30 x 8 machines x 13.97 hours = 3,351.69 in all" in said
    assert "0.02 x 3,479.18 GiB = 69.58 a month" in said


def test_centuries_are_no_traceback():
    most = 10**15
    said = call_mlcd(
        "plan", "--images", most, "--clusters", most, "--dimension", 65536, "--images-per-s", 1,
        "--tflops", 1e-12,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "years" in said.stdout
    assert "EiB" in said.stdout


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
        ((*GIVEN, "--dimension", 10**12), "1000000000000 is not in the range"),
        ((*GIVEN, "--dimension", 8, "--images", 9), "9 images cannot make 10 clusters"),
        ((*GIVEN, "--dimension", 8, "--labels", 11), "10 clusters cannot give an image 11 labels"),
        ((*GIVEN, "--dimension", 8, "--images", -1), "-1 is not in the range"),
        ((*GIVEN, "--dimension", 8, "--tflops", 0), "0.0 is not in the range"),
        ((*GIVEN, "--dimension", 8, "--network-gbit", "nan"), "network-gbit"),
        ((*GIVEN, "--dimension", 8, "--hour-price", "inf"), "hour-price"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, message):
    result = call_mlcd(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
