"""Labels by the ensemble of the real Triton: the bytes of the service's own scan, and that scan
where Triton has no labels, or not ours.
"""

import time

import httpx
import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request, open_artifact
from mlcd.export.triton import export_triton
from mlcd.export.triton_config import TritonOptions
from mlcd.export.triton_labels import export_labels
from mlcd.service.inference.lookup import Lookup
from tests.integration.running import serving
from tests.triton.conftest import SILENT, Server, require_triton
from tests.triton.gateway.conftest import NAME

pytestmark = pytest.mark.triton

RAW = {"accept": "application/octet-stream"}


@pytest.fixture(scope="module")
def labeled(journey, tmp_path_factory):
    """A Triton with labels by the journey's centers, and a service before it."""
    require_triton()
    place = tmp_path_factory.mktemp("labeled")
    options = TritonOptions("python", num_threads=1)
    version = export_triton(
        str(journey / "model"), place / "repository", name=NAME, options=options, reporter=SILENT
    )
    centers = journey / "model" / "centers"
    export_labels(version, open_artifact(centers, "centers"), options=options, reporter=SILENT)
    triton = Server(place / "repository", place / "triton.log")
    triton.start()
    with serving(NAME, engine="triton", triton__url=triton.url, centers=centers) as running:
        yield triton, running.url
    triton.kill()


def post(url, route, images, **query):
    files = [("files", (path.name, path.read_bytes(), "image/png")) for path in images]
    answer = httpx.post(f"{url}/v1/{route}", params=query, files=files, headers=RAW, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.content


def labels(url, images, **query):
    return post(url, "labels", images, **query)


def scanned(url, images, centers, top=8, threshold=None):
    """The bytes of our own scan for the embeddings that the service gives."""
    rows = np.frombuffer(post(url, "images/embed", images), "<f4").reshape(len(images), -1)
    found = Lookup(Centers.open(centers)).nearest(rows, top, threshold)
    return found.ids.astype("<i4").tobytes() + found.scores.astype("<f4").tobytes()


def by_engine(url):
    """The rows that the service says to have labeled by Triton."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith('mlcd_labels_found_total{by="engine"}')]
    return float(counts[0].split()[1]) if counts else 0


def counted(triton):
    """The images that Triton has labeled: counted only after the answer has gone."""
    latest, before = triton.metric("nv_inference_count", f"{NAME}-labels"), None
    while latest != before:
        time.sleep(0.3)
        latest, before = triton.metric("nv_inference_count", f"{NAME}-labels"), latest
    return latest


@pytest.fixture
def centers(journey):
    return journey / "model" / "centers"


@pytest.fixture(scope="module")
def images(digits):
    return sorted(digits.rglob("*.png"))[:40]


@pytest.mark.parametrize("query", [{}, {"top": 20}, {"top": 5, "threshold": 0.3}])
def test_labels_come_from_triton_with_the_bytes_of_our_own_scan(labeled, images, centers, query):
    triton, url = labeled
    # others than those whose embeddings are in the cache since the query before
    chosen = images[:10] if not query else images[10:20] if "threshold" in query else images[20:30]
    assert httpx.get(f"{url}/v1/info").json()["centers"]["labels_by"] == "engine"
    before, ours = counted(triton), by_engine(url)
    found = labels(url, chosen, **query)
    assert counted(triton) == before + len(chosen)
    assert by_engine(url) == ours + len(chosen)
    assert found == scanned(url, chosen, centers, **query)


def test_embeddings_alone_cost_triton_no_labels(labeled, images):
    triton, url = labeled
    before = counted(triton)
    post(url, "images/embed", images[30:34])
    assert counted(triton) == before


def test_more_labels_than_triton_has_and_no_ensemble_are_the_cpus(labeled, images, centers):
    triton, url = labeled
    chosen = images[34:37]
    assert labels(url, chosen, top=90) == scanned(url, chosen, centers, top=90)
    triton.unload(f"{NAME}-labeled")
    before = counted(triton)
    chosen = images[37:]
    assert labels(url, chosen) == scanned(url, chosen, centers)
    assert counted(triton) == before


def test_labels_by_other_centers_are_not_taken(labeled, images, journey, tmp_path):
    triton, _ = labeled
    triton.load(f"{NAME}-labeled")
    _halve(journey, tmp_path / "fewer")
    before = counted(triton)
    with serving(
        NAME, engine="triton", triton__url=triton.url, centers=tmp_path / "fewer"
    ) as running:
        assert labels(running.url, images[:3]) == scanned(
            running.url, images[:3], tmp_path / "fewer"
        )
    assert counted(triton) == before


def _halve(journey, folder):
    whole = Centers.open(journey / "model" / "centers")
    half = Centers(whole.vectors[::2], whole.sizes[::2], whole.fingerprint, mean=whole.mean)
    with Draft(folder, Request("centers", {"half": True}, (), whole.fingerprint)) as draft:
        half.write(draft)
        draft.publish(summary={})
