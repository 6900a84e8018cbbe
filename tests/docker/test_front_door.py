"""`docker compose up` in a fresh clone, with Docker and nothing else: words, one's own pictures,
one's own model, and what cannot be read.
"""

import base64
import json
import shutil
import subprocess
import time

import httpx
import numpy as np
import pytest

from tests.docker.engine import ROOT, Stack, docker

NAME = "mlcd-door"
CLASSES = ("airplanes", "elephant", "Motorbikes", "sunflower")
EACH = 12


@pytest.fixture(scope="module")
def clone(engine, tmp_path_factory):
    """A checkout right after `git clone`."""
    folder = tmp_path_factory.mktemp("clone") / "mlcd"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    assert not (folder / "demo").exists()
    return folder


@pytest.fixture(scope="module")
def photos(shared_data, tmp_path_factory):
    """A few photographs that everybody may read."""
    folder = tmp_path_factory.mktemp("photos")
    for name in CLASSES:
        target = folder / name
        target.mkdir()
        for path in sorted((shared_data / "caltech101_20" / name).glob("*.jpg"))[:EACH]:
            shutil.copyfile(path, target / path.name)
    folder.chmod(0o755)
    return folder


@pytest.fixture
def door(clone):
    """Makes stacks of the clone on the same volumes, which are gone afterwards."""
    with Stack(NAME, root=clone):
        yield lambda *files, **environment: Stack(NAME, *files, root=clone, **environment)


def start(stack):
    """Starts it as `docker compose up` does, and returns the seconds until it is ready."""
    began = time.monotonic()
    stack("up", "--detach", "--build", "--wait")
    return time.monotonic() - began


def post(stack, path, asked):
    answer = httpx.post(f"{stack.url}{path}", json=asked, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_for(stack, *stages):
    """Waits until the exploration is in one of these stages, and returns it."""
    deadline = time.monotonic() + 300
    while True:
        now = httpx.get(f"{stack.url}/v1/exploration", timeout=10).json()
        if now["stage"] in stages:
            return now
        assert time.monotonic() < deadline, now
        time.sleep(0.2)


def test_up_alone_serves_the_starter_which_reads_words(door, photos):
    stack = door()
    seconds = start(stack)
    assert stack.inspect("worker")["State"]["Running"]
    info = httpx.get(f"{stack.url}/v1/info", timeout=10).json()
    assert info["model"] == "starter"
    assert httpx.get(stack.url, timeout=10).headers["content-type"].startswith("text/html")
    rows = post(
        stack, "/v1/embeddings", {"model": "starter", "input": ["a dog", "a puppy", "a car"]}
    )
    dog, puppy, car = (np.array(each["embedding"]) for each in rows["data"])
    assert dog @ puppy > dog @ car
    picture = base64.b64encode(min((photos / "Motorbikes").iterdir()).read_bytes()).decode()
    asked = {
        "images": [f"data:image/jpeg;base64,{picture}"],
        "names": ["a motorcycle", "an elephant"],
    }
    names = post(stack, "/v1/classify", asked)["results"][0]["names"]
    assert names[0]["name"] == "a motorcycle"
    assert httpx.get(f"{stack.url}/v1/exploration", timeout=10).json() is None
    print(f"ready {seconds:.1f} s after `docker compose up` with images that were built before")


def test_up_with_photos_shows_them_grouped_named_and_found_by_words(door, photos):
    stack = door(PHOTOS=photos)
    ready = start(stack)
    began = time.monotonic()
    done = wait_for(stack, "done", "failed")
    made = time.monotonic() - began
    assert (done["error"], done["pictures"]) == (None, EACH * len(CLASSES))
    centers = httpx.get(f"{stack.url}/v1/centers", timeout=10).json()["centers"]
    assert any(center["name"] for center in centers)
    found = post(stack, "/v1/collections/photos/search?top=5", {"texts": ["a motorcycle"]})
    ids = [match["id"] for match in found["results"][0]["matches"]]
    assert all(each.startswith("Motorbikes/") for each in ids)
    mounts = {mount["Destination"]: mount["RW"] for mount in stack.inspect("api")["Mounts"]}
    assert mounts["/photos"] is False
    stack("restart", "api")
    began = time.monotonic()
    stack.wait_ready()
    again = wait_for(stack, "done", "failed")
    assert (again["error"], again["clusters"], again["done"]) == (None, done["clusters"], 0)
    assert httpx.get(f"{stack.url}/v1/centers", timeout=10).json()["centers"] == centers
    print(
        f"{done['pictures']} photographs: ready after {ready:.1f} s, named {made:.1f} s later;"
        f" a second start {time.monotonic() - began:.1f} s"
    )


def test_another_folder_or_model_is_explored_in_place_of_the_first(door, photos, model_dir):
    start(first := door(PHOTOS=photos))
    wait_for(first, "done")
    other = door(PHOTOS=photos / CLASSES[0])
    start(other)
    assert wait_for(other, "done", "failed")["pictures"] == EACH
    mine = door(PHOTOS=photos / CLASSES[0], MODEL=model_dir / "model")
    start(mine)
    done = wait_for(mine, "done", "failed")
    assert (done["error"], done["pictures"]) == (None, EACH)
    assert httpx.get(f"{mine.url}/v1/info", timeout=10).json()["model"] != "starter"


@pytest.mark.parametrize("variable", ["PHOTOS", "MODEL"])
def test_a_folder_that_is_not_there_is_refused_and_not_made(door, tmp_path, variable):
    missing = tmp_path / "missing"
    refused = door(**{variable: missing})("up", "--detach", check=False)
    assert refused.returncode != 0
    assert f"bind source path does not exist: {missing}" in refused.stderr
    assert not missing.exists()


def test_what_the_server_cannot_read_is_told_in_one_line_of_log_and_page(door, photos, tmp_path):
    empty, closed, private = (tmp_path / name for name in ("empty", "closed", "private"))
    empty.mkdir()
    closed.mkdir()
    private.mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))[:3]):
        shutil.copyfile(path, private / f"{number}.jpg").chmod(0o600)
    empty.chmod(0o755)
    private.chmod(0o755)
    closed.chmod(0o700)
    for folder, told in (
        (empty, "/photos must hold images"),
        (closed, "/photos cannot be read: permission denied: let user 10001 read it"),
        (private, "the file cannot be read: permission denied"),
    ):
        stack = door(PHOTOS=folder)
        start(stack)
        error = wait_for(stack, "done", "failed")["error"]
        assert told in error
        log = stack("logs", "--no-log-prefix", "api").stdout.splitlines()
        lines = [json.loads(line) for line in log if '"level":"warning"' in line]
        assert [line["message"] for line in lines] == [f"the exploration stopped: {error}"]


def test_empty_variables_are_as_unset(door):
    empty = door(PORT="", PHOTOS="", MODEL="", DATA_DIR="", MEMORY="", COLLECTIONS_STORE="")
    assert empty("config").stdout == door(PORT=8000)("config").stdout


def test_with_a_gpu_it_is_the_same_with_another_image(door, photos):
    services = json.loads(
        door("deploy/compose/gpu.yml", PHOTOS=photos)("config", "--format", "json").stdout
    )["services"]
    assert {name: services[name]["build"]["target"] for name in ("api", "worker")} == {
        "api": "api-gpu",
        "worker": "worker-gpu",
    }
    for name in ("api", "worker"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert services["api"]["environment"]["MLCD_EXPLORE__PLACE"] == "/photos"


def test_make_compose_up_is_the_same_and_waits_until_it_is_ready(door, clone):
    stack = door()
    made = subprocess.run(
        ["make", "--silent", "compose-up", f"COMPOSE={' '.join(stack.command)}"],
        cwd=clone,
        env=stack.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert f"{stack.url}/ is ready" in made.stdout
    assert httpx.get(f"{stack.url}/health/ready", timeout=10).status_code == 200
    assert docker("port", stack.container("api")).stdout.split()[-1].startswith("127.0.0.1:")
