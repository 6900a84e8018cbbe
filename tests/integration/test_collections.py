"""Collections over HTTP: an afternoon with one, what is refused, what survives, and who may only
read.
"""

import json
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from mlcd.types import unit_rows
from tests.integration.bodies import data_uri, files
from tests.integration.running import Server, asking, children, serving, until

ODD_IDS = ["sea/1.png", "ä é/☃?x=1#y&z", "100%", "...", "../../etc/passwd", "☃" * 341, "/"]
ODD_IDS += ["x/thumbnail", "thumbnail", "%0A"]


@pytest.fixture
def photos(client):
    """The path of an empty collection."""
    path = "/v1/collections/photos"
    assert client.put(path).status_code == 201
    yield path
    assert client.delete(path).json() == {"collection": "photos", "outcome": "deleted"}


def item_path(photos, item_id):
    return f"{photos}/items/{quote(item_id, safe='')}"


def outcomes(answer):
    assert answer.status_code == 200, answer.text
    return {result["id"]: result["outcome"] for result in answer.json()["results"]}


def random_rows(client, num, seed=0):
    dimension = client.get("/v1/info").json()["dimension"]
    return unit_rows(np.random.default_rng(seed).standard_normal((num, dimension)))


def put(client, photos, rows, start=0):
    items = [
        {"id": f"i{n}", "embedding": row.tolist(), "metadata": {"n": n}}
        for n, row in enumerate(rows, start)
    ]
    return client.post(f"{photos}/items", json={"items": items})


def found(answer):
    assert answer.status_code == 200, answer.text
    return [[match["id"] for match in result["matches"]] for result in answer.json()["results"]]


def test_images_are_added_found_described_anew_and_deleted(client, photos, digits, picture):
    paths = sorted(digits.rglob("*.png"))[:6]
    names = [path.name for path in paths]
    given = json.dumps(
        [{"id": name, "metadata": {"n": n, "odd": n % 2 == 1}} for n, name in enumerate(names)]
    )
    form = {"files": files(*[path.read_bytes() for path in paths]), "data": {"items": given}}
    assert outcomes(client.post(f"{photos}/items", **form)) == dict.fromkeys(names, "created")
    assert outcomes(client.post(f"{photos}/items", **form)) == dict.fromkeys(names, "unchanged")
    _, data, expected = picture
    embedded = {"id": "q", "embedding": (3 * expected).tolist()}
    body = {"items": [{"id": "p", "image": data_uri(data)}, embedded]}
    assert outcomes(client.post(f"{photos}/items", json=body)) == {"p": "created", "q": "created"}
    described = client.get(photos).json()
    assert (described["items"], described["fields"], described["usable"]) == (8, ["n", "odd"], True)
    both = client.post(f"{photos}/search?top=2", files=files(data))
    assert {*found(both)[0]} == {"p", "q"}
    assert both.json()["results"][0]["matches"][1]["similarity"] == pytest.approx(1, abs=1e-5)
    kept = client.get(item_path(photos, "q"), params={"embedding": True}).json()
    assert kept["embedding"] == pytest.approx(expected.tolist(), abs=1e-6)
    odd = client.post(
        f"{photos}/search", json={"ids": names, "top": 9, "filter": {"field": "odd", "eq": True}}
    )
    assert [len(ids) for ids in found(odd)] == [3] * 6
    assert odd.json()["matching"] == 3
    in_query = client.post(
        f"{photos}/search", params={"filter": '{"field": "n", "lt": 2}'}, files=files(data)
    )
    assert {*found(in_query)[0]} == {*names[:2]}
    for outcome in ("updated", "unchanged"):
        changed = client.patch(item_path(photos, "p"), json={"metadata": {"album": "sea"}})
        assert changed.json()["outcome"] == outcome
    assert client.get(item_path(photos, "p")).json()["metadata"] == {"album": "sea"}
    assert client.delete(item_path(photos, "p")).json()["outcome"] == "deleted"
    for gone in (client.get, client.delete):
        assert gone(item_path(photos, "p")).status_code == 404
    assert found(client.post(f"{photos}/search?top=2", files=files(data)))[0][0] == "q"


def test_what_cannot_be_used_of_a_batch_fails_alone(client, photos, picture):
    row = random_rows(client, 1)[0].tolist()
    bad = {
        "no": {"embedding": row[:-1]},
        "zero": {"embedding": [0.0] * len(row)},
        "word": {"embedding": ["x"] * len(row)},
        "huge": {"embedding": [1e308] * len(row)},
        "both": {"embedding": row, "image": data_uri(picture[1])},
        "none": {},
        "path": {"image": "/etc/passwd"},
        "damaged": {"image": data_uri(picture[1][:100])},
        "field": {"embedding": row, "tags": 1},
        "deep": {"embedding": row, "metadata": {"x": [[[[[[[[[1]]]]]]]]]}},
        "text": {"embedding": row, "metadata": "x"},
        "x" * 1025: {"embedding": row},
        "": {"embedding": row},
    }
    items = [{"id": "good", "embedding": row}, {"id": "good", "embedding": row}, 7]
    items += [{"id": item_id, **fields} for item_id, fields in bad.items()]
    answer = client.post(f"{photos}/items", content=json.dumps({"items": items}), headers=JSON)
    assert outcomes(answer) == {"good": "created"}
    errors = answer.json()["errors"]
    assert [error["index"] for error in errors] == list(range(1, len(items)))
    expected = {"cannot-be-processed", "unreadable", "undecodable"}
    assert {error["type"] for error in errors} == expected
    assert "shape" in errors[2]["detail"]
    assert client.get(photos).json()["items"] == 1


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"items": [{"id": "a", "embedding": [NaN]}]}', 400, "must be JSON"),
        (b"{}", 400, "`items`"),
        (b'{"items": []}', 400, "`items`"),
        (json.dumps({"items": [1] * 65}), 413, "max_images"),
    ],
)
def test_a_batch_that_is_none_is_refused(client, photos, body, status, said):
    answer = client.post(f"{photos}/items", content=body, headers=JSON)
    assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text


def test_a_form_says_which_file_is_which_item(client, photos, picture):
    for given, said in [
        ({}, "`items`"),
        ({"items": "x"}, "must be JSON"),
        ({"items": "3"}, "list"),
        ({"items": "[]"}, "entry"),
    ]:
        answer = client.post(f"{photos}/items", files=files(picture[1]), data=given)
        assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"filter": {"field": "n", "eq": 2**53 + 1}}, 422, "within ±2^53"),
        ({"filter": 7}, 400, "filter"),
        ({"top": 0}, 400, "top"),
        ({"top": 1001}, 413, "max_top"),
        ({"threshold": 2}, 400, "threshold"),
        ({"exact": "yes"}, 400, "exact"),
        ({"ids": []}, 400, "ids"),
        ({"ids": ["i0"], "id": "i0"}, 400, "exactly one of"),
        ({"ids": ["absent"]}, 404, "'absent'"),
        ({"embeddings": [[1, 2]]}, 400, "finite numbers"),
        ({"without": {"id": "i0"}}, 400, "`id` in `without`"),
    ],
)
def test_a_search_that_cannot_be_is_refused(client, photos, asked, status, said):
    put(client, photos, random_rows(client, 1))
    given = asked if {"id", "ids", "embeddings"} & asked.keys() else {"ids": ["i0"], **asked}
    answer = client.post(f"{photos}/search", json=given)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
    wrong = next((name for name in asked if name not in ("id", "ids")), None)
    if status != 413 and wrong is not None:
        assert answer.json()["param"].partition(".")[0].partition("[")[0] in (*asked,)


def test_a_deep_filter_is_refused_however_deep(client, photos):
    put(client, photos, random_rows(client, 1))
    for levels in (9, 100, 1100, 100_000):
        deep = '{"not":' * levels + '{"field":"n","eq":1}' + "}" * levels
        answer = client.post(
            f"{photos}/search", content='{"ids":["i0"],"filter":' + deep + "}", headers=JSON
        )
        assert answer.status_code in (400, 413, 422)
        assert "too deep" in answer.json()["detail"] or answer.json()["limit"] == "max_json_values"
        assert len(answer.content) < 1000
    long = {"or": [{"field": "n", "eq": n} for n in range(129)]}
    refused = client.post(f"{photos}/search", json={"ids": ["i0"], "filter": long})
    assert "at most 128" in refused.json()["detail"]


def test_an_option_is_given_once(client, photos):
    put(client, photos, random_rows(client, 3))
    assert len(found(client.post(f"{photos}/search?top=2", json={"ids": ["i0"]}))[0]) == 2
    assert len(found(client.post(f"{photos}/search", json={"ids": ["i0"], "top": 2}))[0]) == 2
    twice = client.post(f"{photos}/search?top=2", json={"ids": ["i0"], "top": 2})
    assert (twice.status_code, twice.json()["param"]) == (400, "top")


def test_a_name_that_is_a_path_is_refused(running_anew):
    for method in ("PUT", "GET", "DELETE"):
        answer = httpx.request(method, f"{running_anew.url}/v1/collections/%2E%2E")
        assert (answer.status_code, "cannot name a collection" in answer.text) == (422, True), (
            answer.text
        )
    assert sorted(path.name for path in running_anew.state.iterdir()) == ["collections"]


def test_a_collection_is_made_once_and_for_one_thing(client, photos):
    assert client.put(photos).status_code == 200
    assert client.put(photos, json={"recall": 0.99}).status_code == 200
    for body, status in [
        ({"recall": 0.5}, 409),
        ({"recall": 0}, 400),
        ({"recall": 1}, 400),
        ({"dimension": 3}, 422),
    ]:
        assert client.put(photos, json=body).status_code == status
    assert client.put(photos, json={"dimension": 0, "x": 1}).status_code == 400
    assert client.get("/v1/collections/absent").status_code == 404
    assert client.delete("/v1/collections/absent").status_code == 404


@pytest.mark.parametrize("item_id", ODD_IDS)
def test_every_id_reaches_its_item(running_anew, item_id):
    """The ids are bytes in the path, because clients normalize dots."""
    with httpx.Client(base_url=running_anew.url) as client:
        photos = "/v1/collections/odd"
        client.put(photos)
        row = random_rows(client, 1)[0].tolist()
        sent = {"items": [{"id": item_id, "embedding": row, "metadata": {"is": item_id}}]}
        assert outcomes(client.post(f"{photos}/items", json=sent)) == {item_id: "created"}
        path = f"{photos}/items/{quote(item_id, safe='').replace('.', '%2E')}"
        assert client.get(path).json()["metadata"] == {"is": item_id}
        assert found(client.post(f"{photos}/search", json={"id": item_id, "top": 1})) == [[item_id]]
        expected = {"collection": "odd", "id": item_id, "outcome": "deleted"}
        assert client.delete(path).json() == expected


def test_an_id_that_no_line_can_hold_is_refused(client, photos, digits):
    row = random_rows(client, 1)[0].tolist()
    answer = client.post(f"{photos}/items", json={"items": [{"id": "a\nb", "embedding": row}]})
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["type"]) == (200, "cannot-be-processed")
    assert "id" in error["detail"]
    assert client.get(photos).json()["items"] == 0
    files = [("files", ("a.png", next(digits.rglob("*.png")).read_bytes(), "image/png"))]
    form = {"items": json.dumps([{"id": "a\nb"}])}
    (error,) = client.post(f"{photos}/items", data=form, files=files).json()["errors"]
    assert error["type"] == "cannot-be-processed"


def test_near_duplicates_are_grouped(client, photos):
    rows = random_rows(client, 30)
    rows[20] = unit_rows(rows[3:4] + 0.01 * rows[5:6])[0]
    put(client, photos, rows)
    groups = client.post(f"{photos}/duplicates", json={"similarity": 0.99}).json()["groups"]
    assert [sorted(group["ids"]) for group in groups] == [["i20", "i3"]]
    assert groups[0]["similarities"] == pytest.approx([float(rows[3] @ rows[20])] * 2, abs=1e-5)
    assert client.post(f"{photos}/duplicates", json={"similarity": 2}).status_code == 400


@pytest.fixture(scope="module")
def running_anew(journey, tmp_path_factory):
    """A server with a state folder of its own, empty at first."""
    state = tmp_path_factory.mktemp("state")
    with serving(journey / "model", state_dir=state) as server:
        server.state = state
        yield server


def test_metrics_tell_of_each_collection(running_anew):
    with httpx.Client(base_url=running_anew.url) as client:
        client.put("/v1/collections/counted")
        put(client, "/v1/collections/counted", random_rows(client, 5))
        client.post("/v1/collections/counted/search", json={"id": "i0"})
        assert running_anew.metric('mlcd_collection_items{collection="counted"}') == 5
        assert running_anew.metric('mlcd_collection_unindexed{collection="counted"}') == 5
        assert running_anew.metric("mlcd_index_search_duration_seconds_count") >= 1
        assert running_anew.metric('mlcd_searches_total{by="cpu"}') >= 1
        client.delete("/v1/collections/counted")
        assert "counted" not in client.get("/metrics").text
        route = 'mlcd_requests_total{route="/v1/collections/{name}/items",status="200"}'
        assert running_anew.metric(route) >= 1


def test_hundreds_of_collections_are_no_hundreds_of_series(running_anew):
    with httpx.Client(base_url=running_anew.url) as client, ThreadPoolExecutor(8) as pool:
        paths = [f"/v1/collections/many-{n:03d}" for n in range(120)]
        assert {answer.status_code for answer in pool.map(client.put, paths)} == {201}
        series = re.findall(r"^mlcd_collection_items\{", client.get("/metrics").text, re.MULTILINE)
        assert len(series) == 100
        assert {answer.status_code for answer in pool.map(client.delete, paths)} == {200}
    assert not [
        path for path in (running_anew.state / "collections").iterdir() if "many" in path.name
    ]


def test_a_server_without_a_place_keeps_none(journey):
    with asking(journey / "model") as (_, client):
        assert client.get("/v1/collections").json() == {"collections": [], "unusable": []}
        refused = client.put("/v1/collections/photos")
        assert (refused.status_code, "--state" in refused.text) == (409, True)
        assert client.get("/v1/collections/photos").status_code == 404


def test_collections_of_another_model_are_listed_refused_and_can_be_deleted(new_state):
    with asking("hog", state_dir=new_state()) as (_, client):
        (demo,) = client.get("/v1/collections").json()["collections"]
        assert (demo["name"], demo["items"], demo["usable"]) == ("demo", 200, False)
        assert client.get("/v1/info").json()["collections"] == []
        path = "/v1/collections/demo"
        for refused in (
            client.get(path),
            client.put(path),
            client.post(f"{path}/search", json={"id": "x"}),
            client.post(f"{path}/items", json={"items": [1]}),
            client.get(f"{path}/items/x"),
            client.patch(f"{path}/items/x", json={"metadata": {}}),
            client.delete(f"{path}/items/x"),
            client.post(f"{path}/duplicates"),
        ):
            assert refused.status_code == 409, refused.text
            assert demo["fingerprint"] in refused.text
        assert client.delete(path).status_code == 200
        assert client.get("/v1/collections").json() == {"collections": [], "unusable": []}


def test_several_processes_search_and_change_nothing(journey, new_state, picture):
    """Also after a crash, when the ledger's log is still beside it."""
    state = new_state()
    with asking(journey / "model", state_dir=state) as (server, client):
        put(client, "/v1/collections/demo", random_rows(client, 3))
        server.process.kill()
        server.process.communicate()
    server = Server(journey / "model", state_dir=state, processes=2).wait_ready()
    try:
        until(lambda: server.metric("mlcd_processes") == 2, 30, server)
        with httpx.Client(base_url=server.url) as client:
            path = "/v1/collections/demo"
            for _ in range(8):
                answer = httpx.post(f"{server.url}{path}/search?top=1", files=files(picture[1]))
                assert found(answer)[0]
            assert found(client.post(f"{path}/search?top=1", json={"id": "i2"})) == [["i2"]]
            described = client.get(path).json()
            assert (described["items"], described["writable"]) == (203, False)
            for refused in (
                put(client, path, random_rows(client, 1)),
                client.put("/v1/collections/new"),
                client.delete(path),
                client.patch(f"{path}/items/i2", json={"metadata": {}}),
                client.delete(f"{path}/items/i2"),
            ):
                assert (refused.status_code, "for searches only" in refused.text) == (409, True), (
                    refused.text
                )
            assert server.metric('mlcd_collection_items{collection="demo"}') == 203
    finally:
        status, output = server.stop()
    assert (status, "Traceback" in output) == (0, False), output


def test_a_full_disk_is_told_without_its_place_and_later_writes_go_on(journey, tmp_path):
    """The disk is a limit on the size of a file, which SQLite meets as it would meet the end of the
    disk.
    """
    with asking(journey / "model", state_dir=tmp_path) as (server, client):
        path = "/v1/collections/photos"
        client.put(path)
        rows = random_rows(client, 4000)
        assert outcomes(put(client, path, rows[:64]))
        pids = [server.process.pid, *children(server.process.pid)]
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
        start = 64
        while (answer := put(client, path, rows[start : start + 64], start)).status_code == 200:
            start += 64
        assert answer.status_code == 503
        assert "full" in answer.json()["detail"]
        assert str(tmp_path) not in answer.text
        assert answer.headers["retry-after"]
        ids = ["i0", f"i{start - 1}"]
        assert found(client.post(f"{path}/search?top=1", json={"ids": ids})) == [[i] for i in ids]
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert put(client, path, rows[start : start + 64], start).status_code == 200
        assert client.get(path).json()["items"] == start + 64
