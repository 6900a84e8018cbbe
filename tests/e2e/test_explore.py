"""`mlcd explore`: a folder of pictures to a page, killed at any moment, and what changed since."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from PIL import Image

import mlcd
from mlcd.artifacts.centers import Centers
from mlcd.artifacts.labels import LabelTable
from mlcd.artifacts.manifest import open_artifact
from mlcd.collections.collection import Collection
from mlcd.types import unit_rows
from tests.conftest import call_mlcd, free_port, refuse, run_mlcd, succeed, write_digits
from tests.integration.running import until

NUM = 120


@pytest.fixture
def photos(tmp_path):
    """120 pictures in folders, one that is damaged, and a file that is none."""
    folder = write_digits(tmp_path / "photos", NUM)
    (folder / "damaged.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    (folder / "notes.txt").write_text("not a picture")
    return folder


def explore(photos, state, *arguments):
    done = succeed("explore --model hog --once", photos, "--state", state, *arguments, run=run_mlcd)
    return done.stdout


def held(state):
    with Collection.open(state / "collections" / "photos", read_only=True) as collection:
        return {item.id for block in collection.items() for item in block}


def keys_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*.png")}


def test_from_python_it_is_a_page_that_can_be_stopped(photos, tmp_path):
    with mlcd.explore(photos, model="hog", state=tmp_path / "state", port=free_port()) as explored:
        assert httpx.get(explored.url).status_code == 200
        until(lambda: httpx.get(f"{explored.url}v1/exploration").json()["stage"] == "done", 60)
        assert repr(explored) == f"<photos at {explored.url}>"
        assert f'<iframe src="{explored.url}"' in explored._repr_html_()
        again = mlcd.explore(photos, model="hog", state=tmp_path / "state")
        assert again.url == explored.url  # it is open already, and stays
        again.stop()
        assert httpx.get(explored.url).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(explored.url)
    explored.stop()
    with pytest.raises(mlcd.MlcdError, match="the model nowhere does not exist"):
        mlcd.explore(photos, model="nowhere", state=tmp_path / "other")


class Exploring:
    """A running `mlcd explore`, in a process group of its own."""

    def __init__(self, photos, state, *arguments):
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "mlcd", "explore", photos, "--model", "hog"]
        command += ["--state", state, "--port", port, "--no-browser", *arguments]
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def now(self):
        try:
            return httpx.get(f"{self.url}/v1/exploration", timeout=5).json()
        except httpx.TransportError:
            return {"stage": "none", "pictures": 0}

    def wait(self, condition):
        until(lambda: condition(self.now()), 60, self)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            output, _ = self.process.communicate(timeout=20)
            assert (self.process.returncode, "Traceback" in output) == (0, False), output


def test_what_it_makes_is_what_the_public_commands_read(photos, tmp_path):
    state = tmp_path / "state"
    said = explore(photos, state)
    assert held(state) == keys_of(photos)
    num = len(Centers.open(state / "centers").vectors)
    assert f"done   {NUM} pictures, 1 file skipped, {num} groups" in said
    for name in ("embeddings", "centers", "labels"):
        succeed("verify", state / name)
    assert set(LabelTable(open_artifact(state / "labels", "labels")).keys) == keys_of(photos)
    errors = (state / "embeddings" / "errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in errors] == ["damaged.jpg"]
    commands = [line.split()[1] for line in said.splitlines() if line.startswith("  mlcd ")]
    assert commands == ["embed", "cluster", "label", "index", "serve"]


def test_imported_vectors_are_explored_without_their_model(photos, tmp_path):
    keys = sorted(keys_of(photos))
    rows = unit_rows(np.random.default_rng(0).standard_normal((NUM - 20, 16)))
    np.save(tmp_path / "theirs.npy", rows)
    (tmp_path / "keys.txt").write_text("".join(f"{key}\n" for key in keys[20:]))
    imported, state = tmp_path / "imported", tmp_path / "state"
    options = "--model-name theirs --keys"
    succeed("import", tmp_path / "theirs.npy", imported, *options.split(), tmp_path / "keys.txt")
    printed = succeed(
        "explore --once --model", imported, photos, "--state", state, run=run_mlcd
    ).stdout
    assert f"{NUM - 20} pictures, 21 files skipped" in printed
    assert f"mlcd cluster {imported} " in printed
    assert "mlcd embed" not in printed
    with Collection.open(state / "collections" / "photos", read_only=True) as collection:
        stored = {item.id: item.embedding for block in collection.items() for item in block}
    assert sorted(stored) == keys[20:]
    assert np.array_equal(np.stack([stored[key] for key in keys[20:]]), rows)
    assert len(LabelTable.open(state / "labels").ids) == NUM - 20
    refuse("embed --model", imported, photos, tmp_path / "no", contains="theirs (vectors only)")


def test_the_next_run_takes_in_what_changed_and_keeps_the_groups(photos, tmp_path):
    state = tmp_path / "state"
    explore(photos, state)
    digest = open_artifact(state / "centers", "centers").digest
    pictures = sorted(photos.rglob("*.png"))
    for path in pictures[:3]:
        path.unlink()
    shutil.copy(pictures[5], photos / "new.png")
    Image.linear_gradient("L").resize((8, 8)).save(pictures[6])  # another one of the same name
    pictures[7].write_bytes(b"no picture any more")
    with Collection.open(state / "collections" / "photos", read_only=True) as collection:
        before = collection.embedding_of(str(pictures[6].relative_to(photos)))
    assert f"{NUM - 3} pictures, 2 files skipped" in explore(photos, state)
    assert held(state) == keys_of(photos) - {str(pictures[7].relative_to(photos))}
    assert open_artifact(state / "centers", "centers").digest == digest
    with Collection.open(state / "collections" / "photos", read_only=True) as collection:
        after = collection.embedding_of(str(pictures[6].relative_to(photos)))
    assert (before != after).any()


def test_when_many_pictures_came_all_are_grouped_anew(photos, tmp_path):
    state, more = tmp_path / "state", tmp_path / "more"
    explore(photos, state)
    digest = open_artifact(state / "centers", "centers").digest
    write_digits(more, 2 * NUM)
    shutil.copytree(more, photos, dirs_exist_ok=True)
    explore(photos, state)
    centers = open_artifact(state / "centers", "centers")
    assert centers.digest != digest
    assert Centers.read(centers).sizes.sum() == 2 * NUM


@pytest.mark.parametrize(
    "stage",
    [
        "embed",
        pytest.param("cluster", marks=pytest.mark.slow),
        pytest.param("label", marks=pytest.mark.slow),
    ],
)
def test_killed_in_any_stage_the_next_run_goes_on(photos, tmp_path, stage):
    state = tmp_path / "state"
    exploring = Exploring(photos, state)
    exploring.wait(lambda now: now["stage"] == stage and now["pictures"] > 0)
    exploring.kill()
    explore(photos, state)
    assert held(state) == keys_of(photos)
    succeed("verify", state / "labels")


def test_the_page_can_have_another_number_of_groups_and_single_pictures(photos, tmp_path):
    state = tmp_path / "state"
    with Exploring(photos, state) as exploring:
        exploring.wait(lambda now: now["stage"] == "done")
        now = exploring.now()
        assert (now["pictures"], now["skipped"]) == (NUM, 1)
        assert now["clusters"] in now["considered"]
        assert now["newest"]
        url = exploring.url
        refused = httpx.post(f"{url}/v1/exploration", json={"clusters": NUM + 1})
        assert refused.status_code == 422
        assert f"between 1 and {NUM}" in refused.json()["detail"]
        assert httpx.post(f"{url}/v1/exploration", json={"clusters": 7}).status_code == 200
        exploring.wait(lambda now: now["stage"] == "done" and now["clusters"] == 7)
        listed = httpx.get(f"{url}/v1/centers", params={"collection": "photos"}).json()
        assert listed["total"] == 7
        assert sum(center["members"] for center in listed["centers"]) == NUM
        files = httpx.get(f"{url}/v1/exploration/skipped").json()["files"]
        assert [file["key"] for file in files] == ["damaged.jpg"]
        key = next(iter(keys_of(photos)))
        picture = httpx.get(f"{url}/v1/exploration/pictures/{key}")
        assert (picture.status_code, picture.headers["content-type"]) == (200, "image/webp")
        assert httpx.get(f"{url}/v1/exploration/pictures/notes.txt").status_code == 404
        assert httpx.get(f"{url}/v1/exploration/pictures/..%2Fsecret").status_code == 404

        other = run_mlcd("explore --model hog --no-browser", photos, "--state", state, timeout=60)
        assert (other.returncode, other.stdout) == (0, f"already open: {url}/\n")
    with Exploring(photos, state) as exploring:  # the number that was asked for is kept
        exploring.wait(lambda now: now["stage"] == "done")
        assert exploring.now()["clusters"] == 7


def members_of(state, center):
    labels = LabelTable(open_artifact(state / "labels", "labels"))
    return {key for key, ids in zip(labels.keys, labels.ids, strict=True) if ids[0] == center}


def test_names_stay_when_all_are_grouped_anew_and_what_was_deleted_stays_away(photos, tmp_path):
    state = tmp_path / "state"
    with Exploring(photos, state, "--clusters", "4") as exploring:
        exploring.wait(lambda now: now["stage"] == "done")
        url = exploring.url
        answer = httpx.patch(f"{url}/v1/centers/0", json={"name": "mine"})
        assert answer.status_code == 200, answer.text
        keys = members_of(state, 0)
        asked = httpx.post(f"{url}/v1/exploration", json={"clusters": 2}).json()
        assert asked["stage"] == "cluster"  # so that the page goes on asking
        exploring.wait(lambda now: now["stage"] == "done" and now["clusters"] == 2)
        centers = httpx.get(f"{url}/v1/centers").json()["centers"]
        (again,) = [center["id"] for center in centers if center["name"] == "mine"]
        assert 2 * len(keys & members_of(state, again)) > len(keys)
        # a name that is given in the middle is refused, or stays
        httpx.post(f"{url}/v1/exploration", json={"clusters": 3})
        answers = []
        while exploring.now()["stage"] != "done":
            answers.append(httpx.patch(f"{url}/v1/centers/1", json={"name": f"try {len(answers)}"}))
        assert {answer.status_code for answer in answers} <= {200, 409}, answers[-1].text
        names = [center["name"] for center in httpx.get(f"{url}/v1/centers").json()["centers"]]
        last = f"try {len(answers) - 1}"  # it may be the group of that name which was renamed
        assert {"mine", last} & {*names}
        if answers and answers[-1].status_code == 200:
            assert last in names
        gone = min(keys)
        assert httpx.delete(f"{url}/v1/collections/photos/items/{gone}").status_code == 200
    explore(photos, state)
    assert held(state) == keys_of(photos) - {gone}


def test_a_place_without_pictures_ends_the_server(tmp_path):
    (tmp_path / "empty").mkdir()
    exploring = Exploring(tmp_path / "empty", tmp_path / "state")
    output, _ = exploring.process.communicate(timeout=60)
    assert exploring.process.returncode == 2, output
    assert "must hold images, found none" in output.splitlines()[-1]


def test_what_is_kept_is_listed_and_forgotten(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "nothing is kept" in call_mlcd("explore", "--list").stdout
    succeed("explore", photos, "--model", "hog", "--once", env=dict(os.environ), run=run_mlcd)
    (line,) = call_mlcd("explore", "--list").stdout.splitlines()
    assert line.startswith(f"{photos}   by hog, {NUM} grouped: ")
    succeed("explore", "--forget", photos)
    assert "nothing is kept" in call_mlcd("explore", "--list").stdout
    refuse("explore", "--forget", photos, contains="was never explored")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere", "give the folder of your pictures"),
        ("empty", "must hold images, found none"),
        ("damaged", "none of the 1 files"),
        (None, "give the PHOTOS"),
    ],
)
def test_a_place_without_pictures_is_refused_in_one_line(tmp_path, name, told):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.jpg").write_bytes(b"\xff\xd8\xff")
    place = [] if name is None else [tmp_path / name]
    state = ["--state", tmp_path / "state"]
    refuse("explore", *place, "--model", "hog", *state, "--once", contains=told, run=run_mlcd)


def test_a_state_of_other_pictures_is_refused(photos, tmp_path):
    state, other = tmp_path / "state", tmp_path / "other"
    explore(photos, state)
    write_digits(other, 10)
    for place, told in (
        (state, "holds the exploration of"),
        (other / "s", "lies inside the images"),
    ):
        given = (other, "--state", place)
        refuse("explore --model hog --once", *given, contains=told, run=run_mlcd)


def test_with_other_weights_at_the_place_of_the_model_all_is_explored_anew(
    photos, tmp_path, journey, two_tower_model
):
    state, model = tmp_path / "state", tmp_path / "model"
    for weights in (journey / "model", two_tower_model):
        model.unlink(missing_ok=True)
        model.symlink_to(weights)
        explore(photos, state, "--model", model)
        fingerprint = open_artifact(model, "model").fingerprint
        assert open_artifact(state / "centers", "centers").fingerprint == fingerprint
        with Collection.open(state / "collections" / "photos", read_only=True) as collection:
            assert collection.fingerprint == fingerprint
        assert held(state) == keys_of(photos)


def test_a_few_pictures_that_are_all_the_same_make_one_group(tmp_path):
    folder = tmp_path / "same"
    folder.mkdir()
    for number in range(5):
        Image.new("L", (16, 16), 200).save(folder / f"{number}.png")
        time.sleep(0.01)
    done = succeed(
        "explore --model pixels --once", folder, "--state", tmp_path / "state", run=run_mlcd
    )
    assert "5 pictures, 1 group" in done.stdout
