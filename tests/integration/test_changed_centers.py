"""A server whose centers were changed: answers name clusters that last, and count what is new."""

import io

import httpx
import numpy as np
import pytest
from PIL import Image

from mlcd.artifacts.living_centers import LivingCenters
from mlcd.artifacts.manifest import open_artifact
from tests.conftest import call_mlcd
from tests.integration.bodies import files
from tests.integration.running import serving


@pytest.fixture(scope="module")
def served(tmp_path_factory, digits):
    """Centers of digits, two of them merged."""
    place = tmp_path_factory.mktemp("changed")
    for command in (
        ("embed", digits, place / "rows", "--model", "pixels"),
        ("cluster", place / "rows", place / "centers", "--clusters", 20, "--subtract-mean"),
        ("clusters", "update", place / "centers", place / "rows", place / "updated"),
        ("clusters", "merge", place / "updated", 3, 7, place / "merged"),
    ):
        assert (done := call_mlcd(*command)).returncode == 0, done.stderr
    with serving("pixels", centers=place / "merged", state_dir=place / "state") as server:
        yield place / "merged", server


def test_labels_and_centers_name_the_cluster_and_what_is_novel(served, digits):
    path, server = served
    clusters = LivingCenters.read(open_artifact(path)).clusters
    with httpx.Client(base_url=server.url, timeout=30) as client:
        listed = client.get("/v1/centers?sort=id&limit=500").json()
        assert [each["cluster"] for each in listed["centers"]] == clusters.tolist()
        assert listed["centers"][7]["cluster"] == 3 != listed["centers"][7]["id"]
        assert listed["recent"] == {"images": 0, "novelty": None}
        # a search does not subtract the mean that these centers were compared without
        assert client.put("/v1/collections/photos").status_code == 201
        merged = client.get("/v1/centers/7").json()
        assert (merged["cluster"], merged["collections"]) == (3, [])
        ordinary = [path.read_bytes() for path in sorted(digits.rglob("*.png"))[::9]]
        noise = io.BytesIO()
        pixels = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
        Image.fromarray(pixels).save(noise, format="PNG")
        for image in [*ordinary, noise.getvalue()]:
            answer = client.post("/v1/labels?threshold=0.9", files=files(image)).json()
            for label in answer["results"][0]["labels"]:
                assert label["cluster"] == clusters[label["id"]]
        vectors = client.post("/v1/labels", json={"embeddings": [first_vector(path)]})
        assert vectors.status_code == 200  # what is no image is not counted
        after = client.get("/v1/centers?sort=recent&limit=500").json()
        assert after["recent"]["images"] == len(ordinary) + 1
        first = after["centers"][0]["recent"]
        assert first["novelty"] == max(each["recent"]["novelty"] or 0 for each in after["centers"])
        num_novel = round(after["recent"]["novelty"] * (len(ordinary) + 1))
        assert 1 <= num_novel <= 1 + len(ordinary) // 4
    assert server.metric('mlcd_labeled_images_total{novel="yes"}') == num_novel
    total = num_novel + server.metric('mlcd_labeled_images_total{novel="no"}')
    assert total == len(ordinary) + 1
    # the sent embedding has labels, too
    assert server.metric('mlcd_labels_found_total{by="server"}') == len(ordinary) + 2
    assert server.metric('mlcd_labels_found_total{by="engine"}') == 0


def first_vector(path):
    return np.load(path / "centers.npy")[0].tolist()
