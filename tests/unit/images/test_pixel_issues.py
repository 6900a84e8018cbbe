"""The scores are those that cleanvision 0.3.7 gives for the same pictures."""

import io

import numpy as np
import pytest
from PIL import Image

from mlcd.errors import ImageRejected
from mlcd.images.pixel_issues import issues_of, pixel_scores
from mlcd.types import ISSUES


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def pictures():
    y, x = np.mgrid[:90, :120]
    rng = np.random.default_rng(0)
    gradient = np.stack([x * 2, y * 2, x + y], 2).clip(0, 255).astype(np.uint8)
    return {
        "gradient": gradient,
        "noise": rng.integers(0, 256, (80, 60, 3), dtype=np.uint8),
        "dark": rng.integers(0, 60, (80, 60, 3), dtype=np.uint8),
        "gray": (x * 2).clip(0, 255).astype(np.uint8),
        "strip": np.tile(gradient, (1, 4, 1)),
        "white": np.full((50, 50), 253, np.uint8),
    }


# odd-size (the root of the area), odd-aspect, dark, light, low-information, blurry
SCORES = {
    "gradient": (103.923048, 0.75, 0.720189, 0.867356, 0.853379, 0.257991),
    "noise": (69.282032, 0.75, 0.930352, 0.788223, 0.954623, 0.632988),
    "dark": (69.282032, 0.75, 0.214571, 0.951879, 0.748327, 0.578571),
    "gray": (103.923048, 0.75, 0.92549, 0.953333, 0.690689, 0.512922),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_cleanvision_s(name):
    np.testing.assert_allclose(pixel_scores(png(pictures()[name])), SCORES[name], atol=1e-6)


def test_each_issue_is_found_where_it_is():
    made = pictures()
    scores = np.array([pixel_scores(png(picture)) for picture in made.values()])
    found = {issue: [*np.array([*made])[which]] for issue, which in issues_of(scores).items()}
    assert found == {
        "odd-size": [],
        "odd-aspect": ["strip"],
        "dark": ["dark"],
        "light": ["white"],
        "low-information": ["white"],
        "blurry": ["gradient"],
    }
    sizes = np.array([100.0, 101, 102, 103, 99, 98, 100, 30, 300, np.nan])
    others = np.full((len(sizes), len(ISSUES) - 1), np.nan)
    odd = issues_of(np.column_stack([sizes, others]))
    assert np.flatnonzero(odd["odd-size"]).tolist() == [7, 8]
    assert not any(which[-1] for which in odd.values())
    assert not any(which.any() for which in issues_of(np.full((2, 6), np.nan)).values())


def test_what_is_no_image_has_no_scores():
    with pytest.raises(ImageRejected):
        pixel_scores(b"no image")
