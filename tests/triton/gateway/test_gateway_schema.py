"""tests/integration/test_schema.py with Triton behind the gateway."""

import shutil

import pytest

from tests.integration.running import serving
from tests.integration.test_schema import *  # noqa: F403
from tests.triton.gateway.conftest import NAME

pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.fixture(scope="module")
def explored(journey, triton, new_state, tmp_path_factory):
    """Not the server of the other tests, as there, nor their centers, which are named here."""
    centers = shutil.copytree(
        journey / "model" / "centers", tmp_path_factory.mktemp("own") / "centers"
    )
    with serving(
        NAME, engine="triton", triton__url=triton.url, centers=centers, state_dir=new_state()
    ) as running:
        yield running.url
