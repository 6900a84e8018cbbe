"""Collections over HTTP: an afternoon with one, what is refused, what survives, and who may only
read.
"""

import json
import random
import re
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from mlcd.types import unit_rows
from tests.integration.bodies import data_uri, files
from tests.integration.running import Server, children, serving, until

ODD_IDS = [
    "sea/1.png",
    "ä é/☃?x=1#y&z",
    "100%",
    "...",
    "../../etc/passwd",
    "☃" * 341,
    "/",
    "x/thumbnail",
    "thumbnail",
    "%0A",
]


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
    body = {
        "items": [
            {"id": "p", "image": data_uri(data)},
            {"id": "q", "embedding": (3 * expected).tolist()},
        ]
    }
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
    assert (
        client.patch(item_path(photos, "p"), json={"metadata": {"album": "sea"}}).json()["outcome"]
        == "updated"
    )
    assert (
        client.patch(item_path(photos, "p"), json={"metadata": {"album": "sea"}}).json()["outcome"]
        == "unchanged"
    )
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
    assert {error["type"] for error in errors} == {
        "cannot-be-processed",
        "unreadable",
        "undecodable",
    }
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
        ({"ids": ["i0"], "id": "i0"}, 400, "give one of"),
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
    assert (
        "at most 128"
        in client.post(f"{photos}/search", json={"ids": ["i0"], "filter": long}).json()["detail"]
    )


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
        assert client.delete(path).json() == {
            "collection": "odd",
            "id": item_id,
            "outcome": "deleted",
        }


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
    with serving(journey / "model") as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/collections").json() == {"collections": [], "unusable": []}
        refused = client.put("/v1/collections/photos")
        assert (refused.status_code, "--state" in refused.text) == (409, True)
        assert client.get("/v1/collections/photos").status_code == 404


def test_collections_of_another_model_are_listed_refused_and_can_be_deleted(new_state):
    with (
        serving("hog", state_dir=new_state()) as server,
        httpx.Client(base_url=server.url) as client,
    ):
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
    with (
        serving(journey / "model", state_dir=state) as server,
        httpx.Client(base_url=server.url) as client,
    ):
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
    with (
        serving(journey / "model", state_dir=tmp_path) as server,
        httpx.Client(base_url=server.url) as client,
    ):
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
        assert found(
            client.post(f"{path}/search?top=1", json={"ids": ["i0", f"i{start - 1}"]})
        ) == [
            ["i0"],
            [f"i{start - 1}"],
        ]
        for pid in pids:
            resource.prlimit(
                pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
        assert put(client, path, rows[start : start + 64], start).status_code == 200
        assert client.get(path).json()["items"] == start + 64


class Writer(threading.Thread):
    """Writes until the server is gone. known: what was acknowledged; about: what was asked for
    last.

    A state is (version of the embedding, version of the metadata), None where the item is not
    there.
    """

    def __init__(self, url, path, name, known, first_version):
        super().__init__()
        self.client = httpx.Client(base_url=url, timeout=30)
        self.path, self.name, self.known, self.version = path, name, known, first_version
        self.about, self.num_acknowledged, self.wrong = {}, 0, []
        self.rng = random.Random(first_version)
        self.dimension = len(random_rows(self.client, 1)[0])

    def run(self):
        try:
            while True:
                self.write()
        except httpx.TransportError:
            self.client.close()

    def write(self):
        self.version += 1
        ids = self.rng.sample([f"{self.name}/{n}" for n in range(30)], 3)
        there = [item_id for item_id in ids if self.known.get(item_id)]
        kind = self.rng.choice(["put", "put", "patch", "delete"]) if there else "put"
        version = self.version
        if kind == "put":
            self.about = dict.fromkeys(ids, (version, version))
            row = vector_of(version, self.dimension).tolist()
            items = [
                {"id": item_id, "embedding": row, "metadata": {"version": version}}
                for item_id in ids
            ]
            answer = self.client.post(f"{self.path}/items", json={"items": items})
        elif kind == "patch":
            self.about = {there[0]: (self.known[there[0]][0], version)}
            answer = self.client.patch(
                item_path(self.path, there[0]), json={"metadata": {"version": version}}
            )
        else:
            self.about = {there[0]: None}
            answer = self.client.delete(item_path(self.path, there[0]))
        if answer.status_code != 200 or answer.json().get("errors"):
            self.wrong.append(answer.text)
        self.known |= self.about
        self.num_acknowledged += 1
        self.about = {}


def vector_of(version, dimension):
    return unit_rows(np.random.default_rng(version).standard_normal((1, dimension)))[0]


def killed(journey, state, times):
    path, known, num_acknowledged, rng = "/v1/collections/photos", {}, 0, random.Random(0)
    for number in range(times + 1):
        server = Server(journey / "model", state_dir=state).wait_ready()
        try:
            with httpx.Client(base_url=server.url, timeout=30) as client:
                assert client.put(path).status_code == (201 if number == 0 else 200)
                assert client.put(f"/v1/collections/made-{number}").status_code == 201
                names = {one["name"] for one in client.get("/v1/collections").json()["collections"]}
                assert names == {"photos", *(f"made-{n}" for n in range(number + 1))}
                check(client, path, known)
            if number == times:
                break
            writers = [
                Writer(server.url, path, name, known, (number * 10 + n) * 10**6)
                for n, name in enumerate("abcd")
            ]
            for writer in writers:
                writer.known = {
                    key: value for key, value in known.items() if key.startswith(writer.name)
                }
                writer.start()
            time.sleep(rng.uniform(0.2, 1.0))
            server.process.kill()
            for writer in writers:
                writer.join(60)
                assert writer.wrong == []
                num_acknowledged += writer.num_acknowledged
                known |= writer.known | {
                    key: ("either", writer.known.get(key), value)
                    for key, value in writer.about.items()
                }
        finally:
            server.process.kill()
            server.process.communicate()
    return num_acknowledged


def check(client, path, known):
    """Every item is as it was acknowledged; of a request without an answer all has happened or
    nothing.
    """
    present = {}
    for item_id, state in known.items():
        answer = client.get(item_path(path, item_id), params={"embedding": True})
        allowed = [*state[1:]] if state and state[0] == "either" else [state]
        if answer.status_code == 404:
            assert None in allowed, (item_id, allowed)
            known[item_id] = None
            continue
        item = answer.json()
        fitting = [
            one for one in allowed if one is not None and one[1] == item["metadata"]["version"]
        ]
        assert fitting, (item_id, allowed, item["metadata"])
        assert item["embedding"] == pytest.approx(
            vector_of(fitting[0][0], len(item["embedding"])).tolist(), abs=1e-6
        )
        known[item_id], present[item_id] = fitting[0], item["embedding"]
    assert client.get(path).json()["items"] == len(present)
    if present:
        queries, rows = random_rows(client, 3, seed=len(present)), np.array(list(present.values()))
        answer = client.post(
            f"{path}/search", json={"embeddings": queries.tolist(), "top": 10}
        ).json()
        for result, scores in zip(answer["results"], queries @ rows.T, strict=True):
            best = np.sort(scores)[::-1][:10]
            assert [match["similarity"] for match in result["matches"]] == pytest.approx(
                best.tolist(), abs=1e-5
            )


def test_kill_loses_nothing_that_was_acknowledged(journey, tmp_path):
    assert killed(journey, tmp_path, 1) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_lose_nothing_that_was_acknowledged(journey, tmp_path):
    assert killed(journey, tmp_path, 20) > 200
