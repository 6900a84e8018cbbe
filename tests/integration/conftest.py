"""One real server with a model that was really trained, for all tests that only ask."""

import shutil

import httpx
import pytest

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from tests.integration.running import serving
from tests.integration.s3 import running_moto
from tests.unit.service.conftest import pytest_pyfunc_call  # noqa: F401 - a hook


@pytest.fixture(scope="module")
def model_to_change(journey, tmp_path_factory):
    """The model once more, for servers on which centers are named."""
    return shutil.copytree(journey / "model", tmp_path_factory.mktemp("own") / "model")


@pytest.fixture(scope="session")
def server(journey, new_state):
    with serving(journey / "model", state_dir=new_state()) as running:
        yield running.url


@pytest.fixture(scope="session")
def client(server):
    with httpx.Client(base_url=server, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def model(client):
    return client.get("/v1/models").json()["data"][0]["id"]


@pytest.fixture(scope="module")
def moto():
    with running_moto() as store:
        yield store


@pytest.fixture(scope="session")
def stored(journey):
    return EmbeddingsArtifact.open(journey / "embeddings")


@pytest.fixture(scope="session")
def picture(digits, stored):
    """(key, bytes, embedding that `mlcd embed` gave)."""
    key = stored.keys[17]
    return key, (digits / key).read_bytes(), stored.load()[17]
