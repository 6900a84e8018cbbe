"""The usage of keys, against what clients have sent."""

import io
import json
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from PIL import Image

from mlcd.service.keys.file import create_key
from tests.integration.bodies import data_uri, files
from tests.integration.running import Server, asking, until
from tests.integration.test_batches import begin, results, to_jsonl, wait_ended

MODEL = "fake:text=true,latency_ms=1"

KINDS = ("requests", "images", "texts", "tokens", "bytes")


def picture(color):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), color).save(buffer, "PNG")
    return buffer.getvalue()


def new_key(path, *scopes, **options):
    """Returns the id of a new key, and the headers of a request with it."""
    key, token = create_key(path, "test", scopes=scopes, now=datetime.now(UTC), **options)
    return key.id, {"X-API-Key": token}


def usage(client, headers=None, **params):
    answer = client.get("/v1/usage", headers=headers, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def counts(client, headers=None, **params):
    """The counts of today by key, in the order of KINDS."""
    rows = usage(client, headers, **params)["data"]
    return {row["key"]: tuple(row[kind] for kind in KINDS) for row in rows}


def until_counted(client, key, expected, headers=None):
    """Waits: a client may read an answer before the server has counted it."""
    until(lambda: counts(client, headers).get(key, (0,))[0] >= expected[0], 10)
    assert counts(client, headers)[key] == expected


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def admin(keys):
    return new_key(keys, "admin")


@pytest.fixture(scope="module")
def served(keys, admin, tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    settings = {"engine": "fake", "state_dir": state, "auth__keys_file": keys}
    with asking(MODEL, cache__memory_bytes=2**20, **settings) as (server, client):
        yield server, client


def send(client, method, path, headers, **given):
    """Sends a request, and returns its status and the bytes of its body."""
    request = client.build_request(method, path, headers=headers, **given)
    request.read()
    return client.send(request).status_code, len(request.content)


def test_each_key_has_the_counts_of_its_own_answered_requests(served, keys, admin):
    server, client = served
    key_id, headers = new_key(keys, "embed", "search", "write")
    other_id, other_headers = new_key(keys, "embed")
    until(lambda: client.get("/v1/info", headers=other_headers).status_code == 200, 10)
    red, green = picture("red"), picture("green")
    assert client.put("/v1/collections/colors", headers=headers).status_code == 201
    item = {"items": [{"id": "red", "image": data_uri(red)}]}
    several = files(red, b"no image", green)  # one is answered by an error
    sent = [
        send(client, "POST", path, headers, **given)
        for path, given in (
            ("/v1/images/embed", {"files": several}),
            ("/v1/images/embed", {"files": files(red)}),  # from the cache
            ("/v1/embeddings", {"json": {"model": MODEL, "input": ["a red car", data_uri(red)]}}),
            ("/v1/classify", {"files": files(red), "data": {"names": '["red", "green"]'}}),
            ("/v1/collections/colors/items", {"json": item}),
            ("/v1/collections/colors/search", {"json": {"texts": ["red"]}}),
        )
    ]
    assert [status for status, _ in sent] == [200] * 6
    refused = [
        send(client, "POST", path, headers, **given)[0]
        for path, given in (
            ("/v1/embeddings", {"json": {"model": MODEL, "input": ["red", "data:image/png,"]}}),
            ("/v1/texts/embed", {"json": {"texts": ["red"] * 3000}}),
            ("/v1/labels", {"files": files(red)}),  # without centers
        )
    ]
    assert all(status >= 400 for status in refused)
    assert send(client, "POST", "/v1/texts/embed", other_headers, json={"texts": ["red", ""]}) == (
        200,
        len(b'{"texts":["red",""]}'),
    )
    tokens = 7 + 1 + 1 + 1  # a color is a token, and so is each other letter
    expected = (6, 6, 4, tokens, sum(num for _, num in sent))
    until_counted(client, key_id, expected, headers)
    until_counted(client, other_id, (1, 0, 1, 1, 20), other_headers)
    # Each key sees itself alone, and one of scope admin all keys.
    assert counts(client, headers, key=key_id) == counts(client, headers) == {key_id: expected}
    refusal = client.get("/v1/usage", headers=headers, params={"key": other_id})
    assert (refusal.status_code, refusal.json()["type"]) == (403, "urn:mlcd:problem:forbidden")
    everything = counts(client, admin[1])
    assert everything.keys() == {key_id, other_id}
    assert counts(client, admin[1], key=other_id) == {other_id: everything[other_id]}
    assert client.get("/v1/usage").status_code == 401
    assert server.metric("mlcd_tokens_total") == tokens + 1 + 1  # one of a refused request
    assert server.metric("mlcd_body_bytes_total") == sum(row[-1] for row in everything.values())


def test_a_batch_counts_once_for_its_key(served, keys):
    _, client = served
    key_id, headers = new_key(keys, "embed", "jobs")
    until(lambda: client.get("/v1/info", headers=headers).status_code == 200, 10)
    bodies = [{"model": MODEL, "input": [data_uri(picture((n, 0, 0)))]} for n in range(5)]
    bodies.append({"model": MODEL, "input": ["data:image/png;base64,AAAA"]})
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/embeddings", "body": body}
        for n, body in enumerate(bodies)
    ]
    batch = wait_ended(client, begin(client, to_jsonl(lines), headers=headers), headers=headers)
    assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
    assert len(results(client, batch["output_file_id"], headers=headers)) == 5
    num_bytes = sum(len(json.dumps(body, separators=(",", ":"))) for body in bodies[:5])
    assert counts(client, headers) == {key_id: (5, 5, 0, 0, num_bytes)}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"from": "yesterday"}, "from"),
        ({"from": "2026-1-5"}, "from"),
        ({"to": "2026-02-30"}, "to"),
        ({"from": "2026-02-02", "to": "2026-02-01"}, "from"),
    ],
)
def test_days_that_are_none_are_refused(served, admin, params, param):
    _, client = served
    answer = client.get("/v1/usage", headers=admin[1], params=params)
    assert (answer.status_code, answer.json()["param"]) == (400, param)


def test_what_was_stored_survives_a_kill_and_other_days_are_left_out(tmp_path):
    server = Server("pixels", state_dir=tmp_path).wait_ready()
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert usage(client) == {"object": "list", "store": "sqlite", "data": []}
            body = {"files": files(picture("red"))}
            num_bytes = send(client, "POST", "/v1/images/embed", {}, **body)[1]
            expected = (1, 1, 0, 0, num_bytes)
            until_counted(client, None, expected)
            server.process.kill()
            server.process.communicate()
            server.start_again()
            server.wait_ready()
            (row,) = usage(client)["data"]
            day = datetime.now(UTC).date()
            assert (row["date"], row["key"]) == (day.isoformat(), None)
            assert counts(client) == {None: expected}
            before = (day - timedelta(days=1)).isoformat()
            assert usage(client, to=before)["data"] == []
            assert len(usage(client, **{"from": "0001-01-01", "to": "9999-12-31"})["data"]) == 1
            assert usage(client, to="0001-01-05")["data"] == []
            # A stop writes what no one has asked for.
            send(client, "POST", "/v1/images/embed", {}, **body)
            assert server.stop()[0] == 0
            server.start_again()
            server.wait_ready()
            assert counts(client) == {None: (2, 2, 0, 0, 2 * num_bytes)}
    finally:
        server.stop()


def test_a_server_without_a_place_says_that_it_counts_in_memory():
    with asking("pixels") as (_, client):
        assert usage(client)["store"] == "memory"
        num_bytes = send(client, "POST", "/v1/images/embed", {}, files=files(picture("red")))[1]
        until_counted(client, None, (1, 1, 0, 0, num_bytes))
