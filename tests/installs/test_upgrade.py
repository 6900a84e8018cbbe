"""This version reads what the last release wrote, and the release restores its own backup."""

import json
import subprocess
import urllib.request
from dataclasses import replace

import pytest

from tests.conftest import free_port
from tests.installs.conftest import NUM_IMAGES, ROOT, build_wheel, write_images

pytestmark = pytest.mark.installs


@pytest.fixture(scope="module")
def release(installation, tmp_path_factory):
    """An environment with the release of the last tag."""
    describe = ["git", "-C", ROOT, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    tag = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    if not tag:
        pytest.skip("this checkout has no tag of a release")
    source = tmp_path_factory.mktemp("source")
    archive = subprocess.run(["git", "-C", ROOT, "archive", tag], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    wheel = build_wheel(source, tmp_path_factory.mktemp("release"))
    return installation("serve", "starter", wheel=wheel)


@pytest.fixture(scope="module")
def upgraded(release, installation):
    """An environment with this checkout, working on the files of the release."""
    return replace(installation("serve", "starter"), work=release.work)


def test_the_state_of_the_last_release_is_read_and_its_backup_goes_back(release, upgraded):
    for line in (
        "embed photos emb --model starter",
        "cluster emb centers --clusters 2 --subtract-mean",
        "label emb labels --centers centers",
        "index emb state/collections/photos",
        "keys create ann --file state/keys.json",
        "explore photos --once --state explored",
        "backup state before",
    ):
        check(release, line)
    nearest = search(release, "state")
    labels = (release.work / "labels" / "manifest.json").read_bytes()

    assert search(upgraded, "state") == nearest
    write_images(upgraded.work / "photos" / "more", 2)
    for line in (
        "verify .",
        "label emb labels-again --centers centers",
        "embed photos emb --model starter --append",
        "index emb state/collections/photos --append",
        "explore photos --once --state explored",
    ):
        check(upgraded, line)
    assert (upgraded.work / "labels" / "manifest.json").read_bytes() == labels

    check(release, "restore before back")
    assert search(release, "back") == nearest


def check(installed, line):
    status, output = installed.run("mlcd", *line.split())
    assert status == 0, f"{line}: {output}"


def search(installed, state):
    """Serves the state and returns the keys of all items, the nearest to one image first."""
    port = free_port()
    serve = f"mlcd serve --model starter --state {state} --port {port}"
    process = installed.start(*serve.split())
    try:
        first = process.stdout.readline()
        assert "serving" in first, first + process.communicate(timeout=60)[0]
        image = (installed.work / "photos" / "dark" / "0.png").read_bytes()
        url = f"http://127.0.0.1:{port}/v1/collections/photos/search?top={NUM_IMAGES}"
        request = urllib.request.Request(url, image, {"Content-Type": "image/png"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return [match["id"] for match in json.load(response)["results"][0]["matches"]]
    finally:
        process.terminate()
        process.communicate(timeout=60)
