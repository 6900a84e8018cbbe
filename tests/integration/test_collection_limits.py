"""Collections without number, with few descriptors; names that are none; who may read names."""

import json
import resource
import shutil
from datetime import UTC, datetime

import httpx
import pytest

from mlcd.service.keys.file import create_key
from tests.integration.running import Server, asking, serving

MODEL = "hog"
LIMIT = 128


def add(client, name, item_id):
    row = [0.0] * client.get("/v1/info").json()["dimension"]
    row[len(item_id)] = 1.0
    return client.post(
        f"/v1/collections/{name}/items", json={"items": [{"id": item_id, "embedding": row}]}
    )


def found(client, name, item_id):
    answer = client.post(f"/v1/collections/{name}/search", json={"id": item_id})
    return [match["id"] for match in answer.json()["results"][0]["matches"]]


def test_where_no_file_can_be_opened_that_is_said_and_passes_by_itself(tmp_path):
    with asking(MODEL, state_dir=tmp_path / "state") as (server, client):
        names = [f"c{number}" for number in range(70)]  # the first rests when the last is made
        for name in names:
            client.put(f"/v1/collections/{name}")
            add(client, name, "a")
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        for refused in (
            add(client, "c0", "bb"),
            client.delete("/v1/collections/c0/items/a"),
            client.put("/v1/collections/new"),
            client.delete("/v1/collections/c1"),
            client.get("/v1/collections"),
        ):
            assert refused.status_code == 503, refused.text
            assert "too many open files" in refused.json()["detail"]
            assert "ulimit -n" in refused.json()["detail"]
            assert "disk" not in refused.text
            assert refused.headers["retry-after"]
        assert found(client, "c0", "a") == ["a"]
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert sorted(
            one["name"] for one in client.get("/v1/collections").json()["collections"]
        ) == sorted(names)
        assert add(client, "c0", "bb").json()["results"][0]["outcome"] == "created"
        assert client.put("/v1/collections/new").status_code == 201
        assert client.delete("/v1/collections/c1").status_code == 200


def test_a_start_without_enough_descriptors_says_so_in_one_line(tmp_path):
    state = tmp_path / "state" / "collections"
    with serving(MODEL, state_dir=tmp_path / "state") as server:
        httpx.put(f"{server.url}/v1/collections/c")
    for number in range(LIMIT):
        shutil.copytree(state / "c", state / f"c{number}")
    server = Server(MODEL, state_dir=tmp_path / "state", files=LIMIT)
    output, _ = server.process.communicate(timeout=60)
    assert (server.process.returncode, output.count("\n")) == (2, 1), output
    assert "too many open files" in output
    assert "ulimit -n" in output


def test_no_more_are_made_than_may_be_and_those_that_are_there_stay(tmp_path):
    with asking(MODEL, state_dir=tmp_path, limits__max_collections=2) as (server, client):
        assert client.get("/v1/info").json()["limits"]["max_collections"] == 2
        assert [client.put(f"/v1/collections/{name}").status_code for name in "ab"] == [201, 201]
        refused = client.put("/v1/collections/c")
        assert (refused.status_code, refused.json()["limit"]) == (409, "max_collections"), (
            refused.text
        )
        assert client.put("/v1/collections/a").status_code == 200
        assert client.delete("/v1/collections/a").status_code == 200
        assert client.put("/v1/collections/c").status_code == 201
    with serving(MODEL, state_dir=tmp_path, limits__max_collections=1) as server:
        listed = httpx.get(f"{server.url}/v1/collections").json()["collections"]
        assert [one["name"] for one in listed] == ["b", "c"]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with asking(MODEL, state_dir=tmp_path_factory.mktemp("state")) as (_, client):
        client.put("/v1/collections/a")
        add(client, "a", "b")
        yield client


@pytest.mark.parametrize("name", ["a%2Fb", "a%2Fitems%2Fb", "..%2Fa"])
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE", "PATCH"])
def test_a_name_with_a_slash_is_called_wrong_and_is_no_item(client, method, name):
    body = {"json": {"metadata": {}}} if method == "PATCH" else {}
    answer = client.request(method, f"/v1/collections/{name}", **body)
    assert (answer.status_code, "cannot name a collection" in answer.text) == (422, True), (
        answer.text
    )
    assert client.get("/v1/collections/a/items/b").status_code == 200


def test_what_is_no_route_stays_none(client):
    assert client.get("/v1/collections/a/b").status_code == 404
    assert client.get("/v1/collections/a/search").status_code == 405
    assert client.get("/v1/collections/a/items/b%2Fc").status_code == 404


@pytest.mark.parametrize("processes", [1, 2])
def test_with_keys_names_are_told_to_those_who_may_know_them(tmp_path, processes):
    keys = tmp_path / "keys.json"
    tokens = {
        scope: create_key(keys, "x", scopes=[scope], now=datetime.now(UTC))[1]
        for scope in ("search", "embed")
    }
    with asking(MODEL, state_dir=tmp_path) as (server, client):
        for name in ("secret", "other"):
            client.put(f"/v1/collections/{name}")
            add(client, name, "a")
        assert 'mlcd_collection_items{collection="secret"} 1.0' in client.get("/metrics").text
    with serving(MODEL, state_dir=tmp_path, auth__keys_file=keys, processes=processes) as server:
        shown = httpx.get(
            f"{server.url}/metrics", headers={"Authorization": f"Bearer {tokens['search']}"}
        ).text
        assert 'mlcd_collection_items{collection="secret"} 1.0' in shown
        for headers in ({}, {"X-API-Key": tokens["embed"]}, {"X-API-Key": "wrong"}):
            answer = httpx.get(f"{server.url}/metrics", headers=headers)
            assert answer.status_code == 200
            assert "secret" not in answer.text
            assert "mlcd_collection_items 2.0" in answer.text
            assert "mlcd_collections 2.0" in answer.text
            assert json.dumps("collection") not in answer.text
