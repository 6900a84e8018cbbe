import numpy as np
import pytest

from mlcd.errors import InvalidInput
from mlcd.models.prompts import class_rows, prompt, templates


def test_the_templates_of_clip_are_eighty_and_the_short_set_is_of_them():
    eighty, seven = templates("clip"), templates("simple")
    assert (len(eighty), len(set(eighty)), len(seven)) == (80, 80, 7)
    assert set(seven) < set(eighty)
    assert {"a photo of a {}.", "itap of the {}.", "a {} in a video game."} <= set(eighty)
    assert all(prompt(template, "dog").count("dog") == 1 for template in eighty)


@pytest.mark.parametrize("template", ["no place", "{} and {}", "", "{0}", "{name}"])
def test_a_template_has_one_place_for_the_name(template):
    with pytest.raises(InvalidInput, match="exactly once"):
        prompt(template, "dog")


def test_a_name_is_no_template_itself():
    assert prompt("a photo of {}", "{} or {0.__class__}") == "a photo of {} or {0.__class__}"


def test_a_row_of_a_name_is_the_unit_mean_of_its_unit_rows():
    prompts = np.array([[[1, 0], [0, 1]], [[0.6, 0.8], [0.6, 0.8]]], np.float32)
    rows = class_rows(prompts)
    assert rows.dtype == np.float32
    assert rows == pytest.approx(np.array([[0.5**0.5, 0.5**0.5], [0.6, 0.8]]))
