"""Triton's client over HTTP, in JSON and in binary."""

import base64
import io

import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.removeprefix("http://")) as client:
        yield client


def test_health_and_metadata(client, model, samples):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model)
    assert client.is_model_ready(model, "1")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata(model)
    shapes = {tensor["name"]: tensor["shape"] for tensor in metadata["outputs"]}
    assert shapes["embedding"] == [-1, len(samples[0].embedding)]


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_images_in_json_and_in_binary(client, model, samples, binary_in, binary_out):
    elements = [sample.image if binary_in else base64.b64encode(sample.image) for sample in samples]
    given = triton.InferInput("image", [len(samples)], "BYTES")
    given.set_data_from_numpy(np.array(elements, object), binary_data=binary_in)
    outputs = [
        triton.InferRequestedOutput(name, binary_out)
        for name in ("embedding", "label_ids", "label_scores")
    ]
    answer = client.infer(model, [given], outputs=outputs, request_id="7")
    assert answer.get_response()["id"] == "7"
    rows = answer.as_numpy("embedding")
    assert all(sample.is_embedding(row) for sample, row in zip(samples, rows, strict=True))
    ids, scores = answer.as_numpy("label_ids"), answer.as_numpy("label_scores")
    assert (ids.dtype, ids.shape) == (np.int32, scores.shape)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_a_parameter_that_is_not_taken_is_refused(client, model, samples):
    given = triton.InferInput("image", [1], "BYTES")
    given.set_data_from_numpy(np.array([samples[0].image], object))
    with pytest.raises(
        InferenceServerException, match="`unknown` in `parameters` of the body is not known here"
    ):
        client.infer(model, [given], parameters={"unknown": 1})


def test_prepared_pixels_as_the_exported_triton_model_takes_them(client, model, samples):
    size = client.get_model_metadata(model)["inputs"][1]["shape"][-1]
    pictures = [Image.open(io.BytesIO(sample.image)).convert("RGB") for sample in samples]
    pixels = np.stack(
        [np.asarray(one.resize((size, size), Image.Resampling.BICUBIC)) for one in pictures]
    )
    given = triton.InferInput("image_u8", [len(samples), 3, size, size], "UINT8")
    given.set_data_from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
    rows = client.infer(model, [given]).as_numpy("embedding")
    assert all(sample.is_embedding(row) for sample, row in zip(samples, rows, strict=True))


def test_errors_arrive_as_its_own(client, model, samples):
    given = triton.InferInput("image", [2], "BYTES")
    given.set_data_from_numpy(np.array([samples[0].image, b"no image"], object))
    with pytest.raises(InferenceServerException, match="image 1: not one of"):
        client.infer(model, [given])
    with pytest.raises(InferenceServerException, match="this server serves another model"):
        client.infer("absent", [given])
