"""Texts through the gateway: the tower of texts runs in Triton, its tokenizer in the service."""

import httpx
import numpy as np
import pytest

from mlcd.encoders import open_text_encoder
from mlcd.export.triton import export_triton
from mlcd.export.triton_config import TritonOptions
from tests.integration.running import serving, until
from tests.triton.conftest import SILENT, Server, require_triton

pytestmark = pytest.mark.triton
NAME = "pair"
TEXTS = ["a photo of the cat", "two dogs", "an old red man"]


@pytest.fixture(scope="module")
def repository(two_tower_model, tmp_path_factory):
    require_triton()
    place = tmp_path_factory.mktemp("pair") / "repository"
    options = TritonOptions("python", num_threads=1)
    export_triton(str(two_tower_model), place, name=NAME, options=options, reporter=SILENT)
    return place


@pytest.fixture(scope="module")
def triton(repository):
    server = Server(repository, repository.parent / "triton.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def gateway(triton, repository):
    text = repository / f"{NAME}-text" / "1"
    settings = {"triton__url": triton.url, "triton__text": text, "cache__memory_bytes": 0}
    with serving(NAME, engine="triton", **settings) as running:
        yield running


def test_texts_are_those_of_the_embedded_engine(gateway, two_tower_model):
    encoder = open_text_encoder(str(two_tower_model))
    expected = encoder.encode(encoder.tokenizer(TEXTS))
    encoder.close()
    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        info = client.get("/v1/info").json()
        assert info["texts"]["engine"] == "triton"
        content = client.post("/v1/texts/embed", json={"texts": TEXTS * 20}).json()
        rows = np.array([one["embedding"] for one in content["results"]])
        assert rows == pytest.approx(np.tile(expected, (20, 1)), abs=1e-5)
        asked = {"embeddings": expected[:1].tolist(), "names": TEXTS, "top": 1}
        found = client.post("/v1/classify", json=asked).json()["results"][0]["names"]
        assert [one["name"] for one in found] == TEXTS[:1]
        assert gateway.metric("mlcd_text_engine_up") == 1
        load = client.post(f"/v1/models/{NAME}/load", json={})
        assert (load.status_code, "MLCD_TRITON__TEXT" in load.text) == (409, True)


def test_triton_that_goes_takes_the_readiness_and_gives_it_back(gateway, triton):
    triton.pause()
    until(lambda: not gateway.ready(), 20)
    triton.resume()
    until(gateway.ready, 30)
