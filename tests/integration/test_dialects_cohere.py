"""Cohere's route."""

import base64

import numpy as np
import pytest

from tests.integration.bodies import data_uri


@pytest.fixture
def ask(client, model):
    def post(**body):
        return client.post("/v2/embed", json={"model": model, "input_type": "image", **body})

    return post


def test_every_type_is_of_the_same_embedding(ask, picture):
    _, data, expected = picture
    kinds = ["float", "base64", "int8", "uint8", "binary", "ubinary"]
    answer = ask(images=[data_uri(data)] * 2, embedding_types=kinds).json()
    assert list(answer["embeddings"]) == kinds
    found = {kind: rows[1] for kind, rows in answer["embeddings"].items()}
    assert found["float"] == pytest.approx(expected, abs=1e-5)
    assert np.frombuffer(base64.b64decode(found["base64"]), "<f4") == pytest.approx(
        expected, abs=1e-5
    )
    assert found["int8"] == np.rint(expected * (127 / np.abs(expected).max())).tolist()
    assert [value - 128 for value in found["uint8"]] == found["int8"]
    assert found["ubinary"] == np.packbits(expected >= 0).tolist()
    assert [value + 128 for value in found["binary"]] == found["ubinary"]
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"images": 2}}
    assert answer["texts"] == []


def test_inputs_with_content_lists_and_a_shorter_dimension(ask, picture):
    _, data, expected = picture
    inputs = [{"content": [{"type": "image_url", "image_url": {"url": data_uri(data)}}]}]
    answer = ask(inputs=inputs, output_dimension=8, truncate="END", input_type="search_document")
    assert list(answer.json()["embeddings"]) == ["float"]
    head = expected[:8] / np.linalg.norm(expected[:8])
    assert answer.json()["embeddings"]["float"][0] == pytest.approx(head, abs=1e-5)
    assert answer.json()["id"] == answer.headers["x-request-id"]


URI, TEXT = {"images": ["URI"]}, {"type": "text", "text": "a text"}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "exactly one of"),
        ({"texts": ["a text"]}, 422, "mlcd export MODEL OUT --text"),
        ({"images": ["URI"], "texts": ["a text"]}, 400, "exactly one of"),
        ({"images": ["URI"], "inputs": [{}]}, 400, "exactly one of"),
        ({"images": ["URI", "a text"]}, 422, "image 1"),
        ({"images": ["https://example.com/x.png"]}, 422, "fetching URLs is off"),
        ({"images": ["data:image/png;base64,AAAA"]}, 400, "image 0"),
        ({"inputs": [{"content": [TEXT]}]}, 422, "embedding texts needs a text tower"),
        ({"inputs": [{"content": []}]}, 422, "image 0"),
        ({"inputs": ["URI"]}, 422, "image 0"),
        ({"images": ["URI"], "input_type": "poem"}, 400, "input_type"),
        ({"images": ["URI"], "output_dimension": 17}, 400, "output_dimension must be at most 16"),
        (URI | {"output_dimension": 4, "embedding_types": ["binary"]}, 400, "divisible by 8"),
        ({"images": ["URI"], "model": "absent"}, 404, "serves another model"),
        ({"images": ["URI"] * 65}, 400, "max_images"),
        ({"images": ["URI"], "fusion": True}, 400, "fusion"),
    ],
)
def test_a_refusal_is_in_coheres_shape(ask, picture, body, status, message):
    if "images" in body:
        images = [data_uri(picture[1]) if item == "URI" else item for item in body["images"]]
        body = body | {"images": images}
    answer = ask(**body)
    assert answer.status_code == status
    assert set(answer.json()) == {"id", "message"}
    assert message in answer.json()["message"]


def test_what_is_wrong_before_the_route_is_in_coheres_shape_too(client):
    assert set(client.get("/v2/embed").json()) == {"id", "message"}
    answer = client.post("/v2/embed", content=b"{", headers={"Content-Type": "application/json"})
    assert (answer.status_code, set(answer.json())) == (400, {"id", "message"})
