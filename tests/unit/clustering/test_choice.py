"""The number of clusters is chosen where unseen rows are nearest to one center alone."""

import json

import numpy as np
import pytest

from mlcd.artifacts.manifest import open_artifact
from mlcd.clustering.choice import best, candidates
from mlcd.clustering.rows import ArrayRows, UnitRows
from mlcd.errors import InvalidInput
from mlcd.types import unit_rows
from tests.conftest import call_mlcd


@pytest.fixture(scope="module")
def rows():
    """Twelve directions with 60 rows each."""
    generator = np.random.default_rng(0)
    means = np.repeat(unit_rows(generator.standard_normal((12, 24))), 60, axis=0)
    return UnitRows(ArrayRows([unit_rows(means + 0.08 * generator.standard_normal(means.shape))]))


def test_the_planted_number_is_found_and_the_curve_says_why(rows):
    found = candidates(rows, [3, 6, 12, 24, 48])
    assert best(found) == 12
    assert [each.clusters for each in found] == [3, 6, 12, 24, 48]
    assert all(0 < each.separation < 1 and each.unseen <= each.objective for each in found)
    objectives = [each.objective for each in found]
    assert objectives == sorted(objectives)  # which is why the objective cannot choose
    assert candidates(rows, [12]) == [found[2]]


@pytest.mark.parametrize("nums", [[1, 4], [4, 181]])
def test_numbers_that_cannot_be_compared_are_refused(rows, nums):
    with pytest.raises(InvalidInput, match="give numbers from 2 to 180"):
        candidates(rows, nums)


def test_the_command_clusters_at_the_number_that_it_chose(digits, tmp_path):
    images, out = tmp_path / "rows", tmp_path / "centers"
    assert call_mlcd("embed", digits, images, "--model", "pixels").returncode == 0
    result = call_mlcd("cluster", images, out, "--choose-k", "2,8,40", "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout.splitlines()[-1])
    curve = {each["clusters"]: each["separation"] for each in facts["chosen_of"]}
    assert facts["clusters"] == max(curve, key=curve.get) == 8
    assert open_artifact(out).config["chosen_of"] == [2, 8, 40]


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-3])
@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_near_copies_are_as_many_clusters_as_there_are_scenes(noise, stored):
    """Photographs of a camera that stands still: a distance of nothing is no measure."""
    rng = np.random.default_rng(0)
    scenes = unit_rows(rng.standard_normal((4, 64)))
    rows = unit_rows(np.repeat(scenes, 100, axis=0) + noise * rng.standard_normal((400, 64)))
    nums = [2, 4] if noise == 0 else [2, 4, 8]  # there are no more rows that differ
    found = candidates(UnitRows(ArrayRows([rows.astype(stored)])), nums)
    assert best(found) == 4
    assert all(0 <= each.separation <= 1 for each in found)


def test_too_few_rows_to_compare_are_said_to_be_so(rows):
    with pytest.raises(InvalidInput, match="needs 8 rows, got 5"):
        candidates(UnitRows(ArrayRows([unit_rows(np.eye(5))])), [2])
