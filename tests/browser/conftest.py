"""A browser for the tests of pages, and a server with a few photographs to look at."""

import json
import shutil
from pathlib import Path

import httpx
import pytest
from PIL import Image

from mlcd.artifacts.given_names import change_names, current_names
from mlcd.artifacts.manifest import open_artifact
from mlcd.artifacts.name_evidence import NameEvidence, write_evidence
from tests.browser.chromium import browsing
from tests.conftest import call_mlcd
from tests.integration.running import serving

AXE = Path(__file__).resolve().parents[2] / "service/http/explorer/node_modules/axe-core/axe.min.js"
COLLECTION = "photographs"
GERMAN, JAPANESE = "Straße/Übergröße #1.jpg", "東京/桜の木 50%.jpg"
ORIGINAL = "original.jpg"
SEPARATE = 6  # pictures of each class


@pytest.fixture(scope="session")
def chromium():
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed")
    return program


@pytest.fixture(scope="module")
def page(chromium, tmp_path_factory):
    with browsing(chromium, tmp_path_factory.mktemp("chromium")) as page:
        page.resize(1280, 860)
        yield page


@pytest.fixture(scope="session")
def photographs(tmp_path_factory, request):
    """A folder of photographs, a few of each class; digits where they are not at hand.

    Among them are two copies of one picture, with names of other languages.
    """
    folder = tmp_path_factory.mktemp("photographs")
    shared = Path(__file__).resolve().parents[3] / "shared/data/caltech101_20"
    source = shared if shared.is_dir() else request.getfixturevalue("digits")
    for kind in sorted(path for path in source.iterdir() if path.is_dir()):
        (folder / kind.name).mkdir()
        for picture in sorted(kind.iterdir())[:SEPARATE]:
            shutil.copy(picture, folder / kind.name)
    first = next(path for path in sorted(folder.rglob("*.*")))
    with Image.open(first) as image:
        pixels = image.convert("RGB").resize((200, 150))
    for name, quality in ((ORIGINAL, 95), (GERMAN, 90), (JAPANESE, 85)):
        (folder / name).parent.mkdir(exist_ok=True)
        pixels.save(folder / name, quality=quality)
    return folder


@pytest.fixture(scope="session")
def centers(photographs, tmp_path_factory):
    """Clusters of the photographs, named by their folders, in hog's space."""
    out = tmp_path_factory.mktemp("clusters")
    for command in (
        ("embed", photographs, out / "embeddings", "--model", "hog"),
        ("cluster", out / "embeddings", out / "centers", "--clusters", 8, "--names"),
    ):
        done = call_mlcd(*command)
        assert done.returncode == 0, done.stderr
    artifact = open_artifact(out / "centers")
    names = current_names(artifact).names
    evidence = NameEvidence({}, [grounds(center, name) for center, name in enumerate(names)])
    file = write_evidence(artifact, evidence)
    change_names(artifact, lambda given: given.set_from(file, names))
    return out / "centers"


def grounds(center, name):
    """Evidence as `mlcd name` writes it."""
    return {
        "name": name,
        "alternates": [f"alternate-{center}"],
        "score": 0.7,
        "margin": 0.2,
        "by_chance": 0.1,
        "members": 64,
        "terms": [{"term": name, "score": 0.7, "share": 0.9, "leading": 0.6, "elsewhere": 0.1}],
        "unlike": {"center": (center + 1) % 8, "term": "stripes", "share": 0.8, "there": 0.1},
        "typical": [{"key": "a.jpg", "caption": "An 絵 of it"}],
    }


@pytest.fixture(scope="module")
def explored(photographs, centers, tmp_path_factory):
    """A server with all photographs in a collection, and a root for jobs, for walks that change
    something.
    """
    tmp_path = tmp_path_factory.mktemp("explored")
    (tmp_path / "roots").mkdir()
    with serving(
        "hog", centers=centers, state_dir=tmp_path / "state", jobs__roots=tmp_path / "roots"
    ) as server:
        fill(server.url, photographs)
        server.roots, server.state = tmp_path / "roots", tmp_path / "state"
        yield server


def fill(url, photographs, **headers):
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        client.put(f"/v1/collections/{COLLECTION}").raise_for_status()
        pictures = sorted(path for path in photographs.rglob("*.*") if path.is_file())
        for start in range(0, len(pictures), 32):
            some = pictures[start : start + 32]
            items = [
                {
                    "id": picture.relative_to(photographs).as_posix(),
                    "metadata": {"kind": picture.parent.name, "number": start + number},
                }
                for number, picture in enumerate(some)
            ]
            answer = client.post(
                f"/v1/collections/{COLLECTION}/items",
                files=[("files", picture.read_bytes()) for picture in some],
                data={"items": json.dumps(items)},
            )
            assert answer.raise_for_status().json()["errors"] == []


@pytest.fixture(scope="session")
def axe():
    """The source of axe-core, which is evaluated in a page: its policy refuses script tags."""
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: npm ci in service/http/explorer")
    return AXE.read_text(encoding="utf-8")
