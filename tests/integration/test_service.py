"""The real server with a model that was really trained, over real HTTP."""

import io
import re

import httpx
import numpy as np
import pyarrow as pa
import pytest

from tests.conftest import free_port, run_mlcd
from tests.integration.bodies import data_uri, files


def test_binary_answers_carry_the_same_numbers(client, picture):
    _, data, expected = picture

    def ask(accept):
        sent = {"files": files(data, data), "headers": {"Accept": accept}}
        answer = client.post("/v1/images/embed", **sent)
        assert answer.headers["content-type"] == accept
        return answer.content

    raw = np.frombuffer(ask("application/octet-stream"), "<f4").reshape(2, -1)
    npy = np.load(io.BytesIO(ask("application/x-npy")), allow_pickle=False)
    table = pa.ipc.open_stream(ask("application/vnd.apache.arrow.stream")).read_all()
    arrow = np.array(table.column("embedding").to_pylist(), np.float32)
    for rows in (raw, npy, arrow):
        assert rows[1] == pytest.approx(expected, abs=1e-5)
    refused = client.post("/v1/images/embed", files=files(data), headers={"Accept": "text/html"})
    assert refused.status_code == 406


def test_a_bad_image_fails_alone(client, picture):
    _, data, expected = picture
    answer = client.post("/v1/images/embed", files=files(b"no image", data, b"", data[:60]))
    body = answer.json()
    assert answer.status_code == 200
    assert [result["index"] for result in body["results"]] == [1]
    assert body["results"][0]["embedding"] == pytest.approx(expected, abs=1e-5)
    wanted = {0: "unsupported-format", 2: "empty", 3: "undecodable"}
    assert {error["index"]: error["type"] for error in body["errors"]} == wanted
    strict = client.post(
        "/v1/images/embed", files=files(data, b"no image"), headers={"Accept": "application/x-npy"}
    )
    assert strict.status_code == 415
    assert strict.json()["index"] == 1
    arrow = {"Accept": "application/vnd.apache.arrow.stream"}
    answer = client.post("/v1/images/embed", files=files(data, b""), headers=arrow)
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.column("error").to_pylist() == [None, "empty"]


def test_labels_take_json_images_embeddings_and_a_threshold(client, picture):
    _, data, expected = picture
    by_file = client.post("/v1/labels", files=files(data)).json()["results"][0]["labels"]
    body = {"images": [data_uri(data), "https://example.com/x.png", "/etc/passwd", 7]}
    answer = client.post("/v1/labels", json=body).json()
    assert answer["results"][0]["labels"] == by_file
    assert [error["index"] for error in answer["errors"]] == [1, 2, 3]
    by_vector = client.post("/v1/labels", json={"embeddings": [expected.tolist()]}).json()[
        "results"
    ][0]["labels"]
    assert [label["id"] for label in by_vector] == [label["id"] for label in by_file]
    cut = by_file[2]["similarity"]
    kept = client.post(f"/v1/labels?threshold={cut - 1e-6}", files=files(data)).json()["results"][
        0
    ]["labels"]
    assert len(kept) == 3
    every = client.post("/v1/labels?top=1000", files=files(data)).json()["results"][0]["labels"]
    assert len(every) == client.get("/v1/info").json()["centers"]["num_centers"]


def test_own_routes_speak_problem_json(client, picture):
    _, data, _ = picture
    as_json, as_text, as_form = (
        {"Content-Type": kind}
        for kind in ("application/json", "text/plain", "multipart/form-data; boundary=x")
    )
    cases = [
        (client.get("/nothing"), 404),
        (client.get("/v1/labels"), 405),
        (client.post("/v1/labels", json={}), 400),
        (client.post("/v1/labels", content=b"{", headers=as_json), 400),
        (client.post("/v1/labels", json={"embeddings": [[1.0]]}), 400),
        (client.post("/v1/labels", json={"embeddings": [[0.0] * 16]}), 400),
        (client.post("/v1/labels?top=0", files=files(data)), 400),
        (client.post("/v1/labels?top=5000", files=files(data)), 413),
        (client.post("/v1/labels?mode=roughly", files=files(data)), 400),
        (client.post("/v1/labels", content=b"x", headers=as_text), 415),
        (client.post("/v1/images/embed", files={"other": data}), 400),
        (client.post("/v1/images/embed", content=b"--x", headers=as_form), 400),
        (client.post("/v1/images/embed", files=files(*[data] * 65)), 413),
        (client.post("/v1/labels", json={"images": [data_uri(data)] * 65}), 413),
        (client.post("/v1/collections/none/search", files=files(data)), 404),
        (client.post("/v1/collections/demo/search", json={"id": "absent"}), 404),
    ]  # fmt: skip
    for answer, status in cases:
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == status
        assert problem["request_id"] == answer.headers["x-request-id"]


def test_a_body_over_the_limit_is_refused_while_it_streams(client):
    def endless():
        for _ in range(200):
            yield b"x" * 2**20

    try:
        answer = client.post(
            "/v1/images/embed", content=endless(), headers={"Content-Type": "image/png"}
        )
        assert answer.status_code == 413
        assert answer.json()["limit"] == "max_body_bytes"
    except httpx.TransportError:  # the server may close before we have sent everything
        pass
    assert client.get("/health/ready").status_code == 200


def test_the_page_and_the_api_document_are_there(client):
    page = client.get("/")
    assert "mlcd explorer" in page.text
    assert "/v1/labels" in client.get("/openapi.json").json()["paths"]
    docs = client.get("/docs").text
    # Offline by default: no script or style from another host.
    assert [
        url
        for url in re.findall(r'(?:src|href)="([^"]+)"', docs)
        if not url.startswith(str(client.base_url))
    ] == []
    assert "cdn" not in docs
    assert client.get("/swagger/swagger-ui-bundle.js").status_code == 200
    assert client.get("/health/live").json() == {"status": "live"}


def test_files_of_the_page_are_kept_by_browsers_and_allow_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.headers["cache-control"] == "no-cache"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assets = re.findall(r'(?:src|href)="\./(assets/[^"]+)"', page.text)
    kinds = {"svg": "image/svg+xml", "js": "text/javascript", "css": "text/css"}
    assert {name.rpartition(".")[2] for name in assets} == {*kinds}
    for name in ["", *assets]:
        answer = client.get(f"/{name}")
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-encoding"] == "gzip"
        plain = client.get(f"/{name}", headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == answer.content
        assert plain.headers["etag"] != answer.headers["etag"]
        known = client.get(f"/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert (known.status_code, known.content) == (304, b"")
    for name in assets:
        answer = client.get(f"/{name}")
        assert answer.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    for name in ("assets/SOURCE.sha256", "assets/..%2Findex.html", "assets/", "static/index.html"):
        assert client.get(f"/{name}").status_code == 404


def test_what_cannot_be_served_is_refused_in_one_line(journey):
    given = ("--model", journey / "model", "--centers", journey / "centers")
    result = run_mlcd("serve", *given, "--port", free_port())
    assert result.returncode == 2
    assert "in the space of another model" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_port_in_use_is_refused_in_one_line(server, journey):
    result = run_mlcd("serve", "--model", journey / "model", "--port", server.rsplit(":", 1)[1])
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "is in use: give another with --port" in result.stderr
