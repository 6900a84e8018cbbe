"""The gateway before the real Triton, which runs the model that the embedded engine serves in tests/integration."""

import pytest

from mlcd.export.triton import export_triton
from mlcd.export.triton_config import TritonOptions
from tests.integration.conftest import client, model, picture, stored
from tests.integration.running import serving
from tests.triton.conftest import SILENT, Server, require_triton

__all__ = ["client", "model", "picture", "stored"]

NAME = "mlcd-vit"  # what the journey's model is called


@pytest.fixture(scope="session")
def triton(journey, tmp_path_factory):
    require_triton()
    place = tmp_path_factory.mktemp("gateway")
    options = TritonOptions("python", num_threads=1)
    export_triton(
        str(journey / "model"), place / "repository", name=NAME, options=options, reporter=SILENT
    )
    server = Server(place / "repository", place / "triton.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def server(journey, triton, new_state):
    centers = journey / "model" / "centers"
    with serving(
        NAME, engine="triton", triton__url=triton.url, centers=centers, state_dir=new_state()
    ) as running:
        yield running.url
