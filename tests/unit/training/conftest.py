"""The journey up to the labels, without training: what the data room needs of it."""

from pathlib import Path

import pytest

from tests.conftest import run_mlcd


def label_images(images: Path, out: Path) -> Path:
    """features/, centers/ and labels/ (two per image) of the images, by the public commands."""
    for arguments in (
        ("embed", images, out / "features", "--model", "pixels"),
        ("cluster", out / "features", out / "centers", "--clusters", 10),
        ("label", out / "features", out / "labels", "--centers", out / "centers", "--top", 2),
    ):
        result = run_mlcd(*arguments)
        assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="session")
def labeled(tmp_path_factory, digits) -> Path:
    return label_images(digits, tmp_path_factory.mktemp("labeled"))
