"""Our own routes' answers besides JSON, and the origin that every answer states."""

import io

import numpy as np
import pytest
from sklearn.datasets import load_digits

from mlcd.artifacts.centers import Centers
from tests.conftest import run_mlcd, write_digits
from tests.integration.bodies import files
from tests.integration.running import serving


@pytest.fixture(scope="module")
def centers(journey):
    return Centers.open(journey / "model" / "centers")


def test_labels_in_binary_are_those_of_json(client, picture):
    sent = files(picture[1], picture[1])
    labels = client.post("/v1/labels?top=3", files=sent).json()["results"][1]["labels"]
    raw = client.post(
        "/v1/labels?top=3", files=sent, headers={"Accept": "application/octet-stream"}
    )
    length = int(raw.headers["x-mlcd-top"])
    ids = np.frombuffer(raw.content[: 2 * length * 4], "<i4").reshape(2, length)
    scores = np.frombuffer(raw.content[2 * length * 4 :], "<f4").reshape(2, length)
    npy = client.post("/v1/labels?top=3", files=sent, headers={"Accept": "application/x-npy"})
    records = np.load(io.BytesIO(npy.content), allow_pickle=False)
    for found_ids, found_scores in ((ids, scores), (records["ids"], records["scores"])):
        assert found_ids[1].tolist() == [label["id"] for label in labels]
        assert found_scores[1] == pytest.approx([label["similarity"] for label in labels], abs=1e-7)


def test_a_threshold_leaves_empty_places_in_binary(client, picture):
    labels = client.post("/v1/labels?top=3", files=files(picture[1])).json()["results"][0]["labels"]
    cut = (labels[0]["similarity"] + labels[1]["similarity"]) / 2
    asked = {"Accept": "application/x-npy"}
    answer = client.post(
        f"/v1/labels?top=3&threshold={cut}", files=files(picture[1]), headers=asked
    )
    (record,) = np.load(io.BytesIO(answer.content), allow_pickle=False)
    assert record["ids"].tolist() == [labels[0]["id"], -1, -1]
    assert np.isneginf(record["scores"][1:]).all()


def test_binary_labels_refuse_a_batch_with_a_bad_image(client, picture):
    asked = {"Accept": "application/octet-stream"}
    answer = client.post("/v1/labels", files=files(picture[1], b"no image"), headers=asked)
    assert (answer.status_code, answer.json()["index"]) == (415, 1)
    assert answer.json()["type"] == "urn:mlcd:problem:unsupported-format"
    assert (
        client.post(
            "/v1/labels", files=files(picture[1]), headers={"Accept": "text/html"}
        ).status_code
        == 406
    )


def test_every_answer_says_where_it_comes_from(client, picture, centers):
    info = client.get("/v1/info").json()
    assert info["centers"] == {
        "digest": centers.digest,
        "num_centers": len(centers.vectors),
        "modes": ["exact"],
        "audit": None,
        "labels_by": "server",
    }
    assert "JPEG" in info["image_formats"]
    answer = client.post("/v1/labels", files=files(picture[1]))
    assert answer.headers["x-mlcd-centers"] == centers.digest
    assert answer.json()["mode"] == "exact"
    assert "inference;dur=" in answer.headers["server-timing"]


def test_nothing_of_what_was_sent_comes_back_in_an_error(client):
    secret = "SECRET"
    for answer in (
        client.post(f"/v1/labels?mode={secret}", files=files(b"x")),
        client.post(f"/v1/labels?top={secret}", files=files(b"x")),
        client.post("/v1/labels", json={"x": secret}),
        client.post("/v1/labels", json={f"{secret} {secret}": 1}),
        client.post("/v1/labels", json={"images": [secret], "embeddings": [secret]}),
        client.post("/v1/labels", json={"embeddings": [[secret]]}),
        client.post("/v1/labels", content=secret, headers={"Content-Type": f"text/{secret}"}),
        client.post(
            "/v1/images/embed", content=secret, headers={"Content-Type": "multipart/form-data"}
        ),
        client.get("/v1/centers/1", params={"x": secret}),
        client.post("/v1/collections/demo/search", json={"images": "x", "y": secret}),
    ):
        assert secret.lower() not in answer.text.lower()
    assert client.post("/v1/labels", content=b"x", headers={"Content-Type": "image/png"}).json()[
        "errors"
    ]


def test_a_null_is_a_field_that_is_not_given(client, picture):
    vector = picture[2].tolist()
    given = {"embeddings": [vector], "images": None}
    assert client.post("/v1/labels", json=given).status_code == 200
    assert client.post("/v1/collections/demo/search", json=given | {"id": None}).status_code == 200
    by_id = {"id": picture[0], "images": None, "embeddings": None}
    assert client.post("/v1/collections/demo/search", json=by_id).status_code == 200
    assert client.post("/v1/labels", json={"images": None}).status_code == 400


def test_labels_come_with_examples_where_they_are_asked_for(client, picture, centers):
    sent = files(picture[1])
    plain = client.post("/v1/labels?top=3", files=sent).json()["results"][0]["labels"]
    labels = client.post("/v1/labels?top=3&examples=2", files=sent).json()["results"][0]["labels"]
    assert [label["id"] for label in labels] == [label["id"] for label in plain]
    assert all("examples" not in label for label in plain)
    for label in labels:
        expected = [example.key for example in centers.examples.of_center(label["id"])][:2]
        assert [example["id"] for example in label["examples"]] == expected
    for number in (-1, 9):
        refused = client.post(f"/v1/labels?examples={number}", files=sent)
        assert (refused.status_code, refused.json()["param"]) == (400, "examples")


@pytest.mark.slow
def test_approximate_labels_name_themselves_and_their_audited_recall(tmp_path):
    """1,000 clusters of real scans by hog, the whole way by commands; no collection is needed."""
    digits = write_digits(tmp_path / "digits", len(load_digits().images))
    out = tmp_path / "embeddings"
    for command in (
        ("embed", digits, out, "--model", "hog"),
        ("cluster", out, tmp_path / "centers", "--clusters", 1000, "--iterations", 3),
    ):
        result = run_mlcd(*command)
        assert result.returncode == 0, result.stderr
    sent = files(*[path.read_bytes() for path in sorted(digits.rglob("*.png"))[:40]])
    with serving("hog", centers=tmp_path / "centers", approximate="true") as server:
        import httpx

        audit = httpx.get(f"{server.url}/v1/info").json()["centers"]["audit"]
        exact = httpx.post(f"{server.url}/v1/labels", files=sent, timeout=60).json()
        near = httpx.post(f"{server.url}/v1/labels?mode=approximate", files=sent, timeout=60).json()
    assert (exact["mode"], near["mode"]) == ("exact", "approximate")
    assert "audit" not in exact
    assert near["audit"] == audit
    assert audit["low"] >= 0.98
    assert audit["source"] == "centers"
    ids = [
        [{label["id"] for label in result["labels"]} for result in answer["results"]]
        for answer in (exact, near)
    ]
    assert np.mean([len(a & b) / len(a) for a, b in zip(*ids, strict=True)]) > 0.95
