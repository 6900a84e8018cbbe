"""KServe's protocol, byte by byte; tests/sdk has Triton's own client."""

import base64
import io
import json
import struct

import numpy as np
import pytest
from PIL import Image
from tritonclient.utils import InferenceServerException

from mlcd.artifacts.centers import Centers

HEADER = "Inference-Header-Content-Length"


@pytest.fixture
def infer(client, model):
    def post(content, binary=b"", headers=None):
        head = json.dumps(content).encode()
        given = {HEADER: str(len(head))} if binary else {"Content-Type": "application/json"}
        return client.post(
            f"/v2/models/{model}/infer", content=head + binary, headers=given | (headers or {})
        )

    return post


def element(data):
    return struct.pack("<I", len(data)) + data


def json_input(*images, **changes):
    data = [base64.b64encode(image).decode() for image in images]
    return {"name": "image", "shape": [len(images)], "datatype": "BYTES", "data": data} | changes


def binary_input(*images, **changes):
    tensor = b"".join(element(image) for image in images)
    described = {"name": "image", "shape": [len(images)], "datatype": "BYTES"}
    described |= {"parameters": {"binary_data_size": len(tensor)}}
    return described | changes, tensor


def tensors(answer):
    """Every output of an answer, JSON or binary."""
    head = int(answer.headers.get(HEADER, len(answer.content)))
    rest, found = answer.content[head:], {}
    kinds = {"FP32": "<f4", "INT32": "<i4"}
    for output in json.loads(answer.content[:head])["outputs"]:
        if "data" in output:
            values = np.array(output["data"], kinds[output["datatype"]])
        else:
            size = output["parameters"]["binary_data_size"]
            values, rest = np.frombuffer(rest[:size], kinds[output["datatype"]]), rest[size:]
        found[output["name"]] = values.reshape(output["shape"])
    assert rest == b""
    return found


def test_health_and_metadata(client, model, picture):
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    for path in (f"/v2/models/{model}", f"/v2/models/{model}/versions/1"):
        described = client.get(path).json()
        expected = {"name": "embedding", "datatype": "FP32", "shape": [-1, len(picture[2])]}
        assert described["outputs"][0] == expected
        assert client.get(f"{path}/ready").json() == {"name": model, "ready": True}
    assert described["parameters"]["fingerprint"] == client.get("/v1/info").json()["fingerprint"]


def test_a_grpc_client_is_refused_and_disturbs_nobody(server, client):
    grpc = pytest.importorskip("tritonclient.grpc")
    with grpc.InferenceServerClient(server.removeprefix("http://")) as speaker:
        with pytest.raises(InferenceServerException) as caught:
            speaker.is_server_live(client_timeout=20)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert client.get("/health/ready").status_code == 200


def test_embeddings_and_labels_in_json_and_in_binary(infer, picture, journey):
    _, data, expected = picture
    centers = Centers.open(journey / "model" / "centers")
    nearest = np.argsort(-(centers.vectors @ expected))[:3]
    described, tensor = binary_input(data, data)

    def ask(given, binary=b"", **parameters):
        asked = {"id": "x", "inputs": [given], "parameters": {"top": 3, **parameters}}
        return infer(asked, binary)

    for answer in (
        ask(json_input(data, data)),
        ask(json_input(data, data, shape=[2, 1])),
        ask(described, tensor),
        ask(described, tensor, binary_data_output=True),
    ):
        assert answer.status_code == 200, answer.text
        found = tensors(answer)
        assert found["embedding"][1] == pytest.approx(expected, abs=1e-5)
        assert found["label_ids"].tolist() == [nearest.tolist()] * 2
        assert found["label_scores"][1] == pytest.approx(
            centers.vectors[nearest] @ expected, abs=1e-4
        )
        assert b'"id":"x"' in answer.content
        assert answer.headers["x-mlcd-centers"] == centers.digest


def test_outputs_come_as_each_is_asked_for(infer, picture):
    asked = [{"name": "label_ids"}, {"name": "embedding", "parameters": {"binary_data": True}}]
    answer = infer({"inputs": [json_input(picture[1])], "outputs": asked})
    head = json.loads(answer.content[: int(answer.headers[HEADER])])
    assert [list(output)[-1] for output in head["outputs"]] == ["data", "parameters"]
    assert tensors(answer)["embedding"][0] == pytest.approx(picture[2], abs=1e-5)
    only = infer({"inputs": [json_input(picture[1])], "outputs": [{"name": "embedding"}]})
    assert list(tensors(only)) == ["embedding"]


def test_a_raw_body_is_one_image(client, model, picture):
    answer = client.post(f"/v2/models/{model}/infer", content=picture[1], headers={HEADER: "0"})
    assert tensors(answer)["embedding"][0] == pytest.approx(picture[2], abs=1e-5)


def test_prepared_pixels_need_no_decoding(infer, client, model, picture):
    size = client.get(f"/v2/models/{model}").json()["inputs"][1]["shape"][-1]
    square = (
        Image.open(io.BytesIO(picture[1]))
        .convert("RGB")
        .resize((size, size), Image.Resampling.BICUBIC)
    )
    pixels = np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))[None]
    described = {"name": "image_u8", "shape": list(pixels.shape), "datatype": "UINT8"}
    binary = described | {"parameters": {"binary_data_size": pixels.nbytes}}
    for answer in (
        infer({"inputs": [binary]}, pixels.tobytes()),
        infer({"inputs": [described | {"data": pixels.ravel().tolist()}]}),
        infer({"inputs": [described | {"data": pixels.tolist()}]}),
    ):
        assert answer.status_code == 200, answer.text
        assert tensors(answer)["embedding"][0] == pytest.approx(picture[2], abs=1e-5)
    wrong = infer({"inputs": [described | {"data": pixels.ravel().tolist()[1:]}]})
    assert (wrong.status_code, set(wrong.json())) == (400, {"error"})


def test_one_bad_image_refuses_the_request_and_is_named(infer, picture):
    answer = infer({"inputs": [json_input(picture[1], b"no image")]})
    assert answer.status_code == 415
    assert answer.json()["error"].startswith("image 1: ")
    described, tensor = binary_input(picture[1], picture[1][:60])
    assert infer({"inputs": [described]}, tensor).status_code == 422


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/absent", 404),
        ("/v2/models/absent/ready", 404),
        ("/v2/models/{model}/versions/2", 404),
        ("/v2/models/{model}/versions/2/ready", 404),
        ("/v2/models/{model}/infer", 405),
        ("/v2/nothing", 404),
    ],
)
def test_what_is_not_there_is_in_kserves_shape(client, model, path, status):
    answer = client.get(path.format(model=model))
    assert (answer.status_code, set(answer.json())) == (status, {"error"})


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "x"},
        {"datatype": "FP32"},
        {"shape": []},
        {"shape": [0]},
        {"shape": [True]},
        {"shape": [1.0]},
        {"shape": [1, 2]},
        {"shape": [2]},
        {"shape": [10**30]},
        {"data": None},
        {"data": "x"},
        {"data": []},
        {"parameters": {"binary_data_size": 4}},
        {"parameters": {"shared_memory_region": "x"}},
        {"extra": 1},
    ],
)
def test_an_input_that_is_not_what_it_says_is_refused(infer, picture, changes):
    answer = infer({"inputs": [json_input(picture[1], **changes)]})
    # A size beyond the limit may be told as such.
    expected = {400, 413} if changes == {"shape": [10**30]} else {400}
    assert answer.status_code in expected, answer.text
    assert set(answer.json()) == {"error"}


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"inputs": []},
        {"inputs": {}},
        {"inputs": [7]},
        {"outputs": []},
        {"outputs": [{"name": "x"}]},
        {"outputs": [{"name": "embedding", "parameters": {"classification": 3}}]},
        {"outputs": [{"name": "embedding", "parameters": {"binary_data": "yes"}}]},
        {"parameters": {"unknown": 3}},
        {"parameters": {"top": True}},
        {"parameters": {"top": 0}},
        {"id": 7},
        {"id": "x" * 257},
    ],
)
def test_a_request_that_is_not_of_the_protocol_is_refused(infer, picture, content):
    images = {} if not content or "inputs" in content else {"inputs": [json_input(picture[1])]}
    answer = infer(images | content)
    assert (answer.status_code, set(answer.json())) == (400, {"error"}), answer.text


def test_more_labels_or_images_than_the_limit(infer, picture):
    assert (
        infer({"inputs": [json_input(picture[1])], "parameters": {"top": 1001}}).status_code == 413
    )
    described, tensor = binary_input(*[picture[1]] * 65)
    assert infer({"inputs": [described]}, tensor).status_code == 413
