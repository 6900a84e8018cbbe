"""OpenAI's route with the images of NIM, Infinity, vLLM and Jina."""

import base64

import numpy as np
import pytest

from tests.integration.bodies import data_uri


@pytest.fixture
def ask(client, model):
    def post(**body):
        return client.post("/v1/embeddings", json={"model": model, **body})

    return post


def message(*parts):
    return [{"role": "user", "content": list(parts)}]


def image_part(data):
    return {"type": "image_url", "image_url": {"url": data_uri(data)}}


def test_every_way_to_send_an_image_gives_the_same_embedding(ask, picture):
    _, data, expected = picture
    uri, plain = data_uri(data), base64.b64encode(data).decode()
    for body in (
        {"input": uri},  # NIM
        {"input": [uri], "modality": "image", "user": "somebody"},  # Infinity
        {"input": [uri], "modality": ["image"], "input_type": "query", "truncate": "NONE"},
        {"messages": message(image_part(data))},  # vLLM
        {"messages": message({"type": "image_url", "image_url": uri})},
        {"input": [{"image": plain}], "normalized": True, "task": "retrieval.query"},  # Jina
        {"input": [{"image": uri}], "embedding_type": "float"},
        {"input": [{"image_url": {"url": uri}}]},
        {"input": [{"bytes": plain}], "encoding_type": "float"},  # older LlamaIndex
        {"input": [{"url": uri}]},
    ):
        answer = ask(**body)
        assert answer.status_code == 200, (body, answer.text)
        (row,) = answer.json()["data"]
        assert row["embedding"] == pytest.approx(expected, abs=1e-5), body


def test_embeddings_are_base64_floats_or_bits_as_asked(ask, picture):
    _, data, expected = picture
    uri = data_uri(data)
    for option in (
        {"encoding_format": "base64"},
        {"embedding_type": "base64"},
        {"encoding_type": "base64"},
    ):
        text = ask(input=uri, **option).json()["data"][0]["embedding"]
        assert np.frombuffer(base64.b64decode(text), "<f4") == pytest.approx(expected, abs=1e-5)
    bits = np.packbits(expected >= 0).tolist()
    # openai-python adds its encoding_format: what Jina's field says goes before it.
    for option in ({}, {"encoding_format": "base64"}):
        found = ask(input=uri, embedding_type="ubinary", **option).json()["data"][0]["embedding"]
        assert found == bits
        words = ask(input=uri, embedding_type="binary", **option).json()["data"][0]["embedding"]
        assert words == [byte - 128 for byte in bits]
    short = ask(input=uri, dimensions=5).json()["data"][0]["embedding"]
    assert short == pytest.approx(expected[:5] / np.linalg.norm(expected[:5]), abs=1e-5)


def test_both_paths_and_the_headers(client, model, picture):
    _, data, expected = picture
    for path in ("/v1/embeddings", "/embeddings"):
        answer = client.post(
            path, json={"model": model, "input": data_uri(data)}, headers={"X-Request-Id": "mine-1"}
        )
        assert answer.json()["data"][0]["embedding"] == pytest.approx(expected, abs=1e-5)
        info = client.get("/v1/info").json()
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-mlcd-fingerprint"] == info["fingerprint"]
        assert answer.headers["x-mlcd-preprocess-version"] == str(info["preprocess"]["version"])
        stages = [stage.split(";")[0] for stage in answer.headers["server-timing"].split(", ")]
        assert stages == ["cache", "decode", "queue", "inference", "total"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": "URI", "messages": []}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [1, 2, 3]}, 400, "input"),
        ({"input": [[1, 2], [3]]}, 400, "input"),
        ({"input": "some words"}, 422, "input[0]"),
        ({"input": ["URI", None]}, 422, "input[1]"),
        ({"input": ["URI", {"text": "some words"}]}, 422, "input[1]"),
        ({"input": ["URI", {"image": "URI", "text": "some words"}]}, 422, "input[1]"),
        ({"input": ["URI", {}]}, 422, "input[1]"),
        ({"input": ["URI", "https://example.com/x.png"]}, 422, "input[1]"),
        ({"input": "file:///etc/passwd"}, 422, "input[0]"),
        ({"input": "URI", "modality": "text"}, 422, "input[0]"),
        ({"input": ["URI", "URI"], "modality": ["image"]}, 400, "modality"),
        ({"input": "some words", "truncate": "START"}, 400, "truncate"),
        ({"input": "URI", "normalized": False}, 400, "normalized"),
        ({"input": "URI", "embedding_type": "int4"}, 400, "embedding_type"),
        ({"input": "URI", "embedding_type": ["float"]}, 400, "embedding_type"),
        ({"input": "URI", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "URI", "dimensions": 17}, 400, "dimensions"),
        ({"input": "URI", "dimensions": 12, "embedding_type": "binary"}, 400, "embedding_type"),
        ({"input": "URI", "late_chunking": True}, 400, "late_chunking"),
        ({"input": "URI", "model": "gpt"}, 404, None),
        ({"messages": []}, 400, "messages"),
        ({"messages": [7]}, 400, "messages"),
        ({"messages": message({"type": "text", "text": "some words"})}, 422, "messages"),
        ({"messages": [{"role": "user", "content": "some words"}]}, 422, "messages"),
        ({"messages": message({"type": "image_url"})}, 422, "messages"),
        ({"input": ["URI"] * 65}, 400, None),
        ({"input": ["URI", "data:image/png;base64,AAAA"]}, 400, "input[1]"),
    ],
)
def test_a_refusal_is_in_openais_shape_and_names_the_field(ask, picture, body, status, param):
    uri = data_uri(picture[1])
    if isinstance(body.get("input"), list):
        body = {**body, "input": [uri if item == "URI" else item for item in body["input"]]}
    elif body.get("input") == "URI":
        body = {**body, "input": uri}
    answer = ask(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "passwd" not in error["message"]
    assert "some words" not in error["message"]


def test_two_images_in_a_conversation_are_refused(ask, picture):
    part = image_part(picture[1])
    for messages in (
        message(part, part),
        message(part) * 2,
        message(part, {"type": "text", "text": "describe"}),
    ):
        answer = ask(messages=messages)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_what_is_wrong_before_the_route_is_in_openais_shape_too(client):
    def post(path, content, name, value):
        return client.post(path, content=content, headers={name: value})

    for answer, status in (
        (client.get("/v1/embeddings"), 405),
        (post("/v1/embeddings", b"{", "Content-Type", "application/json"), 400),
        (post("/embeddings", b"[]", "Content-Type", "application/json"), 400),
        (post("/v1/embeddings", b"{}", "Content-Type", "text/plain"), 400),
        (post("/v1/embeddings", b"{}", "Content-Encoding", "gzip"), 400),
        (client.get("/v1/models/absent"), 404),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_model_is_described(client, model):
    listed = client.get("/v1/models").json()["data"]
    assert listed == [client.get(f"/v1/models/{model}").json()]
    assert listed[0]["object"] == "model"
