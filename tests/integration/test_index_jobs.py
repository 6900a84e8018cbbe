"""An index job takes images to a search while the server runs."""

import os

import httpx
import pytest

from mlcd.collections.collection import Collection
from mlcd.errors import Conflict
from tests.conftest import run_mlcd, write_digits
from tests.integration.bodies import files
from tests.integration.running import asking


def index(server, environment, model, state, images, output):
    """The job, done by a worker of its own."""
    asked = {"kind": "index", "input": str(images), "output": str(output)}
    accepted = httpx.post(f"{server.url}/v1/jobs", json=asked)
    assert accepted.status_code == 202, accepted.text
    done = run_mlcd("worker", "--model", model, "--state", state, "--drain", env=environment)
    assert done.returncode == 0, done.stderr
    return httpx.get(f"{server.url}/v1/jobs/{accepted.json()['id']}").json()


def test_a_job_s_collection_is_searched_by_the_server_that_runs(journey, tmp_path):
    images, state, model = (
        write_digits(tmp_path / "images", 20),
        tmp_path / "state",
        journey / "model",
    )
    home = state / "collections"
    roots = f"{images},{home}"
    environment = {**os.environ, "MLCD_JOBS__ROOTS": roots}
    home.mkdir(parents=True)
    with asking(model, state_dir=state, jobs__roots=roots) as (server, client):
        assert client.get("/v1/collections/digits").status_code == 404
        for name in (
            "my photos",
            ".hidden",
            "x" * 200,
        ):  # with one of these among its own the server would not start
            asked = {"kind": "index", "input": str(images), "output": str(home / name)}
            assert client.post("/v1/jobs", json=asked).status_code == 422
        job = index(server, environment, model, state, images, home / "digits")
        expected = ("succeeded", 20, 20)
        assert (job["state"], job["progress"]["collected"], job["progress"]["indexed"]) == expected
        assert sorted(path.name for path in home.iterdir()) == ["digits"]
        picture = sorted(images.rglob("*.png"))[7]
        found = client.post(
            "/v1/collections/digits/search?top=1", files=files(picture.read_bytes())
        )
        assert found.status_code == 200, found.text
        (match,) = found.json()["results"][0]["matches"]
        expected = (picture.relative_to(images).as_posix(), True)
        assert (match["id"], match["similarity"] > 0.999) == expected
        pictured = client.get(f"/v1/collections/digits/items/{match['id']}/thumbnail")
        assert (pictured.status_code, pictured.headers["content-type"]) == (200, "image/webp")
        assert server.metric('mlcd_collection_thumbnails{collection="digits"}') == 20
        described = client.get("/v1/collections/digits").json()
        assert (described["items"], described["writable"], described["usable"]) == (20, True, True)
        with pytest.raises(Conflict, match="another process has the collection digits open"):
            Collection.open(home / "digits")

        index(server, environment, model, state, images, home / "more")
        names = [one["name"] for one in client.get("/v1/collections").json()["collections"]]
        assert names == ["digits", "more"]
        index(server, environment, model, state, images, home / "unseen")
        assert client.delete("/v1/collections/unseen").json()["outcome"] == "deleted"
        assert client.get("/v1/collections/unseen").status_code == 404
        assert sorted(path.name for path in home.iterdir()) == ["digits", "more"]

        with _held_elsewhere(home, "held", described):
            refused = client.get("/v1/collections/held")
            assert (refused.status_code, str(home) in refused.text) == (409, False)
            assert [
                one["name"] for one in client.get("/v1/collections").json()["collections"]
            ] == names


def _held_elsewhere(home, name, described):
    """Creates the collection in this process."""
    return Collection.create(
        home / name,
        fingerprint=described["fingerprint"],
        dimension=described["dimension"],
        background=False,
    )
