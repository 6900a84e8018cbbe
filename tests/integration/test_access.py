"""Access to every route of the document, with every kind of key, on the real server."""

import contextlib
import http.client
import io
import re
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from PIL import Image

from mlcd.service.keys.file import SCOPES, create_key, read_keys, revoke_key
from tests.conftest import call_mlcd, run_mlcd, start_mlcd
from tests.integration.bodies import data_uri, files
from tests.integration.running import Server, serving, until
from tests.integration.test_schema import explore

# The open routes of the document; the pages are open too.
OPEN_TO_ALL = {"/health/live", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready"}
NEEDED = {
    "/v1/info": [],
    "/v1/embeddings": ["embed"],
    "/v2/embed": ["embed"],
    "/v1/images/embed": ["embed"],
    "/v1/labels": ["embed"],
    "/v2/models/{model}/infer": ["embed"],
    "/v2/models/{model}": [],
    "/v1/centers": ["search"],
    "/v1/models/{name}/load": ["admin"],
    "/v1/collections/{name}/search": ["search"],
    "/v1/collections/{name}/duplicates": ["search"],
    "/v1/collections/{name}/items": ["write"],
    "/v1/jobs": ["jobs"],
    "/v1/jobs/{job_id}": ["jobs"],
    "/v1/jobs/{job_id}/events": ["jobs"],
    "/v1/jobs/{job_id}/failures": ["jobs"],
    "/v1/jobs/{job_id}/retry": ["jobs"],
}
"""Some of them, by hand: where the document and the routes are wrong in the same way."""


class Keys:
    """A keys file, and tokens by what they are for."""

    def __init__(self, path):
        self.path = path
        self.tokens = {scope: self.create(scope) for scope in SCOPES}
        self.tokens["expired"] = self.create(
            *SCOPES, expires=datetime.now(UTC) - timedelta(seconds=1)
        )
        self.tokens["revoked"] = self.create(*SCOPES)
        revoke_key(path, self.tokens["revoked"][5:13], now=datetime.now(UTC))
        self.tokens["wrong"] = self.tokens["admin"][:-1] + (
            "0" if self.tokens["admin"][-1] != "0" else "1"
        )
        self.tokens["of another file"] = f"mlcd_00000000_{'0' * 64}"

    def create(self, *scopes, **given):
        return create_key(self.path, "test", scopes=scopes, now=datetime.now(UTC), **given)[1]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return Keys(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest.fixture(scope="module")
def running(keys, journey, new_state, tmp_path_factory):
    """Standard error goes to a file, so that all of it can be read while the server runs."""
    log, root = tmp_path_factory.mktemp("log") / "log", tmp_path_factory.mktemp("root")
    with log.open("w") as stderr:
        server = Server(
            journey / "model",
            state_dir=new_state(),
            auth__keys_file=keys.path,
            jobs__roots=root,
            log__level="debug",
            output=stderr,
        )
        server.log, server.root = log, root
        try:
            yield server.wait_ready()
        finally:
            server.process.terminate()
            assert server.process.wait(20) == 0
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def anyone(running):
    with httpx.Client(base_url=running.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def document(anyone):
    return anyone.get("/openapi.json").json()


@pytest.fixture(scope="module")
def operations(document):
    return [
        (method, path, one)
        for path, item in document["paths"].items()
        for method, one in item.items()
    ]


def as_bearer(token):
    return {"Authorization": f"Bearer {token}"}


def as_header(token):
    return {"X-API-Key": token}


def needed(operation):
    """The scopes that the document asks for; None: no key."""
    asked = operation.get("security")
    if asked is None:
        return None
    assert [set(scheme) for scheme in asked] == [{"bearer"}, {"header"}]
    assert asked[0]["bearer"] == asked[1]["header"]
    return asked[0]["bearer"]


def test_every_route_of_the_document_lets_in_whom_it_says_and_nobody_else(anyone, operations, keys):
    """No key, one of each bad kind, one of each scope; each as bearer and in X-API-Key, with no
    body at all.
    """
    bad = [
        None,
        *(keys.tokens[kind] for kind in ("wrong", "revoked", "expired", "of another file")),
        "x",
    ]
    wrong = []
    for method, path, operation in operations:
        address, scopes = re.sub(r"\{\w+\}", "1", path), needed(operation)
        for place in (as_bearer, as_header):
            for token in bad:
                status = anyone.request(
                    method, address, headers=place(token) if token is not None else {}
                ).status_code
                if (status == 401) != (scopes is not None):
                    wrong.append((method, path, "bad key", status))
            for scope in SCOPES:
                status = anyone.request(
                    method, address, headers=place(keys.tokens[scope])
                ).status_code
                let_in = not scopes or scope in (*scopes, "admin")
                if (status not in (401, 403)) != let_in or status in (401, 500):
                    wrong.append((method, path, scope, status))
    assert wrong == []
    assert len(operations) >= 25


def test_every_route_refuses_a_query_that_it_does_not_know(anyone, operations, keys):
    headers = as_bearer(keys.tokens["admin"])
    wrong = []
    for method, path, operation in operations:
        address = re.sub(r"\{\w+\}", "1", path)
        answer = anyone.request(method, f"{address}?no-such=5ec2e7", headers=headers)
        if needed(operation) is None:
            if answer.status_code not in (200, 503):
                wrong.append((method, path, answer.status_code))
        elif (answer.status_code, "`no-such` in the query" in answer.text) != (400, True):
            wrong.append((method, path, answer.status_code, answer.text))
        assert "5ec2e7" not in answer.text
    assert wrong == []


@pytest.mark.parametrize(
    ("method", "address", "said", "param"),
    [
        ("POST", "/v1/labels?k=3", "`k` in the query string is not known here: did you mean `top`?", "k"),
        ("POST", "/v1/labels?Top=3", "did you mean `top`?", "Top"),
        ("POST", "/v1/labels?top=3&treshold=0.5", "did you mean `threshold`?", "treshold"),
        ("POST", "/v1/collections/demo/search?topk=3", "did you mean `top`?", "topk"),
        ("POST", "/v1/collections/demo/search?max_results=3", "did you mean `top`?", "max_results"),
        ("GET", "/v1/jobs?page_size=3", "did you mean `limit`?", "page_size"),
        ("GET", "/v1/collections/demo/items/a?embeddings=true", "did you mean `embedding`?", "embeddings"),
        ("GET", "/v1/info?verbose", "known: none", "verbose"),
        ("GET", "/v1/info?a%20b=1", "a name in the query string", None),
        ("PUT", "/v1/collections/new?recall=0.9", "`recall` in the query string", "recall"),
    ],
)  # fmt: skip
def test_an_unknown_query_is_named_with_what_was_meant(anyone, keys, method, address, said, param):
    answer = anyone.request(method, address, headers=as_bearer(keys.tokens["admin"]))
    assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text
    assert answer.json().get("param") == param


def test_a_key_for_some_collections_sees_nothing_else(anyone, keys, running, picture):
    everything = as_bearer(keys.tokens["admin"])
    for name in ("mine", "theirs"):
        anyone.put(f"/v1/collections/{name}", headers=everything)
        item = {"id": f"of-{name}", "embedding": picture[2].tolist()}
        added = anyone.post(
            f"/v1/collections/{name}/items", json={"items": [item]}, headers=everything
        )
        assert added.json()["results"][0]["outcome"] in ("created", "unchanged")
    scopes = ("search", "write", "jobs", "embed")
    one, other = (as_bearer(keys.create(*scopes, collections=[name])) for name in ("mine", "new"))
    until(lambda: anyone.get("/v1/info", headers=other).status_code == 200, 5)

    listed = anyone.get("/v1/collections", headers=one).json()["collections"]
    assert [described["name"] for described in listed] == ["mine"]
    assert anyone.get("/v1/info", headers=one).json()["collections"] == ["mine"]
    assert anyone.get("/v1/info", headers=other).json()["collections"] == []
    found = anyone.post("/v1/collections/mine/search", json={"id": "of-mine"}, headers=one)
    assert found.json()["results"][0]["matches"][0]["id"] == "of-mine"
    metrics = anyone.get("/metrics", headers=one).text
    assert 'collection="mine"' in metrics
    assert 'collection="theirs"' not in metrics
    assert "theirs" not in anyone.get("/v1/centers/0", headers=one).text

    answers = {}
    for name in ("theirs", "absent"):
        path = f"/v1/collections/{name}"
        row = {"embeddings": [picture[2].tolist()]}
        item = {"items": [{"id": "x", "embedding": picture[2].tolist()}]}
        theirs = f"{path}/items/of-theirs"
        reads = [path, theirs, f"{theirs}/thumbnail", f"{path}/layout"]
        reads += [f"{path}/layout/{what}?by=cluster" for what in ("values", "legend")]
        reads += [f"/v1/centers{of}collection={name}" for of in ("?", "/0?", "/0/members?")]
        asked = [
            ("GET", each, None)
            for each in (*reads, f"/v1/centers/0/values?collection={name}&field=x")
        ]
        asked += [("DELETE", path, None), ("DELETE", theirs, None)]
        asked += [("PATCH", theirs, {"metadata": {}}), ("POST", f"{path}/search", row)]
        asked += [("POST", f"{path}/duplicates", {}), ("POST", f"{path}/items", item)]
        asked += [("POST", f"{path}/layout/items", {}), ("POST", f"{path}/delete", {"ids": ["x"]})]
        answers[name] = [
            anyone.request(method, address, json=body, headers=one)
            for method, address, body in asked
        ]
    for theirs, absent in zip(answers["theirs"], answers["absent"], strict=True):
        assert (theirs.status_code, theirs.json()["detail"]) == (404, absent.json()["detail"])
    for name in ("theirs", "absent"):
        refused = anyone.put(f"/v1/collections/{name}", headers=one)
        assert (refused.status_code, refused.json()["param"]) == (403, "name")
    assert anyone.put("/v1/collections/new", headers=other).status_code == 201
    assert anyone.get("/v1/collections/theirs", headers=everything).json()["items"] == 1
    for name in ("mine", "theirs", "new"):
        assert anyone.delete(f"/v1/collections/{name}", headers=everything).status_code == 200


def test_a_key_for_some_collections_sees_the_jobs_that_it_submitted(anyone, keys, running):
    root = Path(running.root)
    (root / "images").mkdir()
    Image.new("RGB", (32, 32)).save(root / "images" / "a.png")
    everything = as_bearer(keys.tokens["jobs"])
    one, other = (as_bearer(keys.create("jobs", collections=[name])) for name in ("mine", "b"))
    until(lambda: anyone.get("/v1/jobs", headers=other).status_code == 200, 5)

    def submit(output, headers, kind="embed"):
        body = {"kind": kind, "input": str(root / "images"), "output": str(root / output)}
        return anyone.post("/v1/jobs", json=body, headers=headers)

    mine, theirs, also_mine = (
        submit(output, headers).json()["id"]
        for output, headers in (("1", one), ("2", everything), ("3", one))
    )

    def listed(headers, **query):
        answer = anyone.get("/v1/jobs", headers=headers, params=query).json()
        return [job["id"] for job in answer["jobs"]], answer["cursor"]

    assert listed(one) == ([also_mine, mine], None)
    page, cursor = listed(one, limit=1)
    assert (page, listed(one, limit=1, cursor=cursor)) == ([also_mine], ([mine], None))
    assert listed(other) == ([], None)
    assert set(listed(everything)[0]) >= {mine, theirs, also_mine}
    for method, path in (
        ("GET", ""),
        ("GET", "/failures"),
        ("GET", "/events"),
        ("POST", "/retry"),
        ("DELETE", ""),
    ):
        for job_id, headers in ((theirs, one), (mine, other)):
            answer = anyone.request(method, f"/v1/jobs/{job_id}{path}", headers=headers)
            assert (answer.status_code, "unknown job" in answer.text) == (404, True), answer.text
    assert anyone.get(f"/v1/jobs/{theirs}", headers=everything).json()["state"] == "queued"
    refused = submit("collections/theirs", one, "index")
    assert (refused.status_code, refused.json()["param"]) == (403, "output")
    indexed = submit("mine", one, "index")
    assert indexed.status_code == 202, indexed.text
    for job_id in (mine, also_mine, indexed.json()["id"]):
        assert anyone.delete(f"/v1/jobs/{job_id}", headers=one).json()["state"] == "canceled"
    anyone.delete(f"/v1/jobs/{theirs}", headers=everything)


def test_the_document_asks_for_keys_everywhere_but_where_it_must_not(operations):
    by_path = {path: needed(operation) for _, path, operation in operations}
    assert {path for path, scopes in by_path.items() if scopes is None} == OPEN_TO_ALL
    assert {path: by_path[path] for path in NEEDED} == NEEDED
    changed = (
        "/v1/collections/{name}",
        "/v1/collections/{name}/items/{id}",
        "/v1/centers/{center}",
    )
    for place in changed:
        by_method = {
            method: needed(operation) for method, path, operation in operations if path == place
        }
        assert by_method.pop("get") == ["search"]
        assert set(map(tuple, by_method.values())) == {("write",)}


def test_no_other_spelling_of_a_route_goes_around_its_key(running):
    """The routes are sent as bytes on the wire, because clients normalize paths."""
    for method in ("GET", "HEAD", "POST", "OPTIONS"):
        for path in (
            "/v1/info",
            "/v1/%69nfo",
            "//v1/info",
            "/v1/info/",
            "/V1/INFO",
            "/docs/../v1/info",
            "/v1/info;x",
        ):
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
            with contextlib.closing(connection):
                connection.request(method, path)
                assert connection.getresponse().status in (401, 404, 405), (method, path)


def test_the_pages_need_no_key_and_name_no_client(anyone, running):
    script = re.search(r'src="([^"]+)"', anyone.get("/docs").text)[1]
    for page in ("/", "/docs", "/openapi.json", script):
        assert anyone.get(page).status_code == 200
    assert anyone.get("/v1/nothing").status_code == 404


@pytest.mark.slow  # without keys, test_schema.py
def test_the_document_is_true_of_a_server_with_keys(model_to_change, keys, new_state):
    """Not the server of the other tests: collections and names come and go here."""
    header = f"Authorization: Bearer {keys.tokens['admin']}"
    with serving(model_to_change, state_dir=new_state(), auth__keys_file=keys.path) as explored:
        explore(explored.url, 2, "--phases", "examples,coverage", "--header", header, timeout_s=280)


def test_refusals_are_in_the_words_of_each_client(anyone, keys):
    wrong, jobs = as_bearer(keys.tokens["wrong"]), as_bearer(keys.tokens["jobs"])
    shapes = {
        "/v1/labels": lambda body: (body["type"], body["status"], body["detail"]),
        "/v1/embeddings": lambda body: (
            body["error"]["code"],
            body["error"]["type"],
            body["error"]["message"],
        ),
        "/v2/embed": lambda body: (body["message"],),
        "/v2/models/x/infer": lambda body: (body["error"],),
    }
    for path, read in shapes.items():
        missing, refused, lacking = (
            anyone.post(path, headers=headers) for headers in ({}, wrong, jobs)
        )
        assert [answer.status_code for answer in (missing, refused, lacking)] == [401, 401, 403]
        assert "an API key is required" in read(missing.json())[-1]
        assert "is unknown" in read(refused.json())[-1]
        assert "lacks the scope embed" in read(lacking.json())[-1]
        assert missing.headers["www-authenticate"] == 'Bearer realm="mlcd"'
        assert refused.headers["www-authenticate"] == 'Bearer realm="mlcd", error="invalid_token"'
        assert 'error="insufficient_scope", scope="embed"' in lacking.headers["www-authenticate"]
    for kind in ("revoked", "expired"):
        assert (
            f"the API key is {kind}"
            in anyone.get("/v1/info", headers=as_header(keys.tokens[kind])).json()["detail"]
        )


def test_which_header_counts(anyone, keys):
    good, bad = keys.tokens["embed"], keys.tokens["wrong"]

    def status(**headers):
        return anyone.get(
            "/v1/info", headers={name.replace("_", "-"): value for name, value in headers.items()}
        )

    for headers in (
        {"Authorization": f"bearer   {good}"},
        {"Authorization": "Basic dTpw", "X_API_Key": good},
        {"Authorization": f"Bearer {bad}", "X_API_Key": good},
    ):
        assert status(**headers).status_code == 200
    for headers in (
        {"Authorization": good},
        {"Authorization": f"Basic {good}"},
        {"Authorization": f"Bearer {good}", "X_API_Key": bad},
        {"Cookie": f"X-API-Key={good}"},
    ):
        assert status(**headers).status_code == 401
    assert anyone.get("/v1/info", params={"api_key": good, "X-API-Key": good}).status_code == 401


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/images/embed", "image/png"),
        ("/v1/embeddings", "application/json"),
        ("/v1/jobs", "application/json"),
    ],
)
def test_nothing_of_a_request_is_read_before_its_key(running, path, kind):
    """A client without one cannot make the server hold its body: the answer is there before any of
    it is sent.
    """
    with socket.create_connection(("127.0.0.1", running.port), timeout=5) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\n"
            f"Content-Type: {kind}\r\nContent-Length: 60000000\r\n\r\n".encode()
        )
        assert client.recv(100).startswith(b"HTTP/1.1 401 ")
    assert running.metric('mlcd_held{of="bytes"}') == 0


def test_a_new_key_enters_and_a_revoked_one_does_not_within_seconds(anyone, keys):
    made = call_mlcd("keys", "create", "late", "--scope", "embed", "--file", keys.path)
    token = made.stdout.strip()

    def enters():
        return anyone.get("/v1/info", headers=as_bearer(token)).status_code == 200

    assert until(enters, 5) < 5
    assert call_mlcd("keys", "revoke", token[5:13], "--file", keys.path).returncode == 0
    assert until(lambda: not enters(), 5) < 5


def test_keys_that_cannot_be_read_let_nobody_in(anyone, keys, running):
    """Which ones are revoked is not known then. The server recovers with the file."""
    held = keys.path.read_text()
    headers = as_bearer(keys.tokens["embed"])

    def status():
        return anyone.get("/v1/info", headers=headers).status_code

    for damage in (lambda: keys.path.write_text("{"), keys.path.unlink):
        damage()
        until(lambda: status() == 503, 5)
        assert anyone.get("/health/live").status_code == 200
        keys.path.write_text(held)
        until(lambda: status() == 200, 5)
    assert "every key is refused until the file can be read" in running.log.read_text()


def test_a_large_image_that_is_decoded_counts_several_times(anyone, keys):
    def embed(headers, num):
        images = []
        for _ in range(num):
            Image.effect_noise((2001, 2000), 50).save(buffer := io.BytesIO(), "PNG")
            images.append(buffer.getvalue())  # of a little more than rate_pixels
        return anyone.post("/v1/images/embed", files=files(*images), headers=headers)

    one, other = (as_header(keys.create("embed", rate=2)) for _ in range(2))
    until(lambda: anyone.get("/v1/info", headers=other).status_code == 200, 5)
    assert anyone.get("/v1/info", headers=one).json()["limits"]["rate_pixels"] == 4_000_000
    assert [embed(one, 1).status_code for _ in range(2)] == [200, 429]
    refused = embed(other, 2)
    assert (refused.status_code, "counts as 4 images" in refused.text) == (422, True)


def test_a_key_sends_as_many_images_as_its_rate(anyone, keys, running, picture):
    _, data, expected = picture
    token = keys.create("embed", "search", rate=6)
    headers = as_header(token)
    until(lambda: anyone.get("/v1/info", headers=headers).status_code == 200, 5)
    rejected = running.metric('mlcd_rejected_total{reason="rate"}')
    for route, body, status in [
        ("/v1/images/embed", {"files": files(data, b"no image")}, 200),
        ("/v1/labels", {"json": {"embeddings": [expected.tolist()] * 2}}, 200),
        ("/v1/collections/demo/search", {"json": {"images": [data_uri(data)]}}, 200),
        ("/v1/images/embed", {"files": files(data, data)}, 429),
        ("/v1/images/embed", {"content": data, "headers": {"Content-Type": "image/png"}}, 200),
        ("/v1/labels", {"files": files(data)}, 429),
        ("/v1/labels", {"files": files(*[data] * 7)}, 422),
    ]:
        answer = anyone.post(route, **body | {"headers": headers | body.get("headers", {})})
        assert answer.status_code == status, (route, answer.text)
    assert running.metric('mlcd_rejected_total{reason="rate"}') == rejected + 2
    both = [{"id": str(index), "embedding": expected.tolist()} for index in range(6)]
    both += [{"id": str(index), "image": data_uri(data)} for index in range(6, 12)]
    writer = keys.create("write", rate=6)
    until(lambda: anyone.get("/v1/info", headers=as_header(writer)).status_code == 200, 5)
    for items, status in (
        (both, 422),
        (both[4:8], 200),
        (both[4:8], 429),
        (both[5:7], 200),
    ):  # 422, 429: not counted
        answer = anyone.post(
            "/v1/collections/demo/items", json={"items": items}, headers=as_header(writer)
        )
        assert answer.status_code == status, answer.text
    last = anyone.post("/v1/labels", files=files(data), headers=headers)
    assert last.headers["ratelimit-policy"] == '"default";q=6;w=60;qu="images"'
    assert last.headers["ratelimit"] == f'"default";r=0;t={last.headers["retry-after"]}'
    assert "ratelimit" not in anyone.get("/v1/info").headers
    assert 1 <= int(last.headers["retry-after"]) <= 120
    assert f"retry in {last.headers['retry-after']} s" in last.json()["detail"]
    assert anyone.get("/v1/info", headers=headers).status_code == 200
    other = anyone.post("/v1/labels", files=files(data), headers=as_header(keys.tokens["embed"]))
    assert other.status_code == 200


def test_browsers_and_caches_are_told_what_they_may_do(anyone, keys, picture):
    good = as_bearer(keys.tokens["embed"])
    answers = {
        "page": anyone.get("/"),
        "docs": anyone.get("/docs"),
        "refusal": anyone.get("/v1/info"),
        "no route": anyone.get("/v1/nothing"),
        "probe": anyone.get("/health/live"),
        "data": anyone.post("/v1/images/embed", files=files(picture[1]), headers=good),
    }
    for name, answer in answers.items():
        assert answer.headers["x-content-type-options"] == "nosniff", name
        # The page is the same for everybody; it is kept, and asked for whether it still is the same.
        keeping = "no-cache" if name == "page" else "no-store"
        assert answer.headers["cache-control"] == keeping, name
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = answer.headers.get_list("content-security-policy")
        assert len(policy) == 1
        assert policy[0].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy[0]
        assert ("script-src" in policy[0]) == (name in ("page", "docs"))
    assert "http" not in answers["docs"].headers["content-security-policy"]


def test_keys_are_nowhere_but_in_the_answer_to_create(anyone, keys, running, picture):
    """After every kind of request, also such as fail: logs, metrics, answers, the list of
    processes, the disk.
    """
    secrets = [token[14:] for token in keys.tokens.values() if token]
    seen = []
    for token in keys.tokens.values():
        for headers in (
            as_bearer(token),
            as_header(token),
            {"X-API-Key": f"{token}\tx"},
            {"X-Request-Id": "r"},
        ):
            for method, path in (
                ("get", "/v1/info"),
                ("post", "/v1/labels"),
                ("post", "/v1/embeddings"),
                ("get", "/"),
            ):
                answer = anyone.request(method, path, headers=headers)
                seen += [answer.text, str(answer.headers)]
    seen += [anyone.get("/metrics").text, running.log.read_text(), keys.path.read_text()]
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                seen.append((process / name).read_text(errors="replace"))
            except OSError:
                continue
    assert [secret for secret in secrets for text in seen if secret in text] == []
    hashes = [key.sha256 for key in read_keys(keys.path).keys]
    assert not [
        digest
        for digest in hashes
        for text in seen[:-1]
        if digest in text and '"sha256"' not in text
    ]


def test_a_server_that_others_reach_needs_keys_or_a_word():
    refused = run_mlcd("serve", "--model", "hog", "--host", "0.0.0.0", "--port", 0)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "`mlcd keys create`" in refused.stderr
    assert "MLCD_AUTH__MODE=open" in refused.stderr


def test_a_server_that_says_it_is_open_asks_for_nothing_and_documents_nothing():
    with serving("hog", host="0.0.0.0", auth__mode="open") as server:
        assert httpx.get(f"{server.url}/v1/info", headers=as_bearer("whatever")).status_code == 200
        document = httpx.get(f"{server.url}/openapi.json").json()
        assert "securitySchemes" not in document["components"]
        assert not [
            one for item in document["paths"].values() for one in item.values() if "security" in one
        ]


def test_a_server_without_a_usable_keys_file_does_not_start(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text("{}")
    process = start_mlcd(
        "serve", "--model", "hog", "--port", 0, env={"MLCD_AUTH__KEYS_FILE": str(path), "PATH": ""}
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "must contain a valid key: create one with `mlcd keys create`" in output
    assert output.count("\n") == 1
