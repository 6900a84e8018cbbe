"""A thousand collections, and requests for one center after another."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import open_artifact
from mlcd.client import Client
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.types import unit_rows
from tests.attacks.conftest import watched
from tests.conftest import run_mlcd, write_digits
from tests.integration.running import serving

NUM = 1001
ITEMS = 20


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A server with centers and very many small collections."""
    root = tmp_path_factory.mktemp("centers")
    digits = write_digits(root / "digits", 60)
    for command in (
        ("embed", digits, root / "embeddings", "--model", "pixels"),
        ("cluster", root / "embeddings", root / "centers", "--clusters", 5, "--iterations", 2),
    ):
        result = run_mlcd(*command)
        assert result.returncode == 0, result.stderr
    centers = Centers.read(open_artifact(root / "centers", "centers"))
    fingerprint, dimension = centers.fingerprint, centers.vectors.shape[1]
    rows = unit_rows(np.random.default_rng(0).standard_normal((ITEMS, dimension)))
    items = [Item(f"i{number}", row) for number, row in enumerate(rows)]

    def create(number):
        path = root / "state" / "collections" / f"c{number:04}"
        collection = Collection.create(
            path, fingerprint=fingerprint, dimension=dimension, background=False
        )
        collection.add(items)
        collection.close()

    (root / "state" / "collections").mkdir(parents=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, range(NUM)))
    with serving(
        "pixels", centers=root / "centers", state_dir=root / "state", files=8192
    ) as server:
        server.dimension = dimension
        yield server


@pytest.mark.slow
def test_a_label_waits_for_no_search_of_a_thousand_collections(crowded):
    """Forty requests for a center made a label wait for six seconds."""
    label = {"embeddings": [[1.0] * crowded.dimension]}
    with (
        httpx.Client(base_url=crowded.url, timeout=60) as client,
        watched(crowded, "/v1/labels", method="POST", json=label) as watch,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = [*pool.map(lambda _: client.get("/v1/centers/1"), range(40))]
    assert {answer.status_code for answer in answers} == {200}
    described = answers[0].json()
    assert described["collections"] == ["c0000", "c0001", "c0002", "c0003"]
    assert {one["collection"] for one in described["examples"]} <= {None, *described["collections"]}
    assert set(watch.statuses) == {200}
    assert max(watch.seconds) < 1.0


@pytest.mark.slow
def test_the_list_of_a_thousand_collections_comes_in_pages_and_stops_nobody(crowded):
    with httpx.Client(base_url=crowded.url, timeout=60) as client, watched(crowded) as watch:
        first = client.get("/v1/collections").json()
        assert (len(first["collections"]), "next" in first) == (1000, True)
        names, cursor = [], None
        while True:
            params = {"limit": 300} | ({"cursor": cursor} if cursor else {})
            page = client.get("/v1/collections", params=params).json()
            names += [one["name"] for one in page["collections"]]
            if (cursor := page.get("next")) is None:
                break
        assert names == [f"c{number:04}" for number in range(NUM)]
        with Client(crowded.url) as whole:
            assert [one.name for one in whole.collections()] == names
        assert client.get("/v1/collections?cursor=x").status_code == 422
    assert max(watch.seconds) < 1.0
