"""The journey up to the labels, without training, which is what the data room needs of it; and
configs of short runs.
"""

from pathlib import Path

import pytest

from tests.conftest import succeed
from tests.unit.training.running import configured


def label_images(images: Path, out: Path) -> Path:
    """features/, centers/ and labels/ (two per image) of the images, by the public commands."""
    for arguments in (
        ("embed", images, out / "features", "--model", "pixels"),
        ("cluster", out / "features", out / "centers", "--clusters", 10),
        ("label", out / "features", out / "labels", "--centers", out / "centers", "--top", 2),
    ):
        succeed(*arguments)
    return out


@pytest.fixture(scope="session")
def labeled(tmp_path_factory, digits) -> Path:
    return label_images(digits, tmp_path_factory.mktemp("labeled"))


@pytest.fixture
def config(journey, digits, tiny_recipe, tmp_path):
    def make(out, *overrides):
        labels = journey / "labels"
        return configured(
            tiny_recipe, digits, labels, tmp_path / out, "telemetry.peak_tflops=1", *overrides
        )

    return make
