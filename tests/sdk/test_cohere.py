"""Cohere's client."""

import base64

import cohere
import numpy as np
import pytest


@pytest.fixture
def client(server):
    return cohere.ClientV2(api_key="unused", base_url=server)


def test_every_type_is_of_the_stored_embedding(client, model, samples):
    kinds = ["float", "base64", "int8", "uint8", "binary", "ubinary"]
    answer = client.embed(
        model=model,
        input_type="image",
        images=[sample.uri for sample in samples],
        embedding_types=kinds,
    )
    for row, sample in enumerate(samples):
        assert sample.is_embedding(answer.embeddings.float_[row])
        assert sample.is_embedding(
            np.frombuffer(base64.b64decode(answer.embeddings.base64[row]), "<f4")
        )
        int8 = np.array(answer.embeddings.int8[row], np.float64)
        assert int8 @ sample.embedding / np.linalg.norm(int8) > 0.9999
        assert answer.embeddings.uint8[row] == [
            value + 128 for value in answer.embeddings.int8[row]
        ]
        bits = np.unpackbits(np.array(answer.embeddings.ubinary[row], np.uint8))
        assert bits.tolist() == (sample.embedding >= 0).tolist()
        assert [
            value + 128 for value in answer.embeddings.binary[row]
        ] == answer.embeddings.ubinary[row]


def test_inputs_and_output_dimension(client, model, samples):
    inputs = [{"content": [{"type": "image_url", "image_url": {"url": samples[0].uri}}]}]
    answer = client.embed(
        model=model,
        input_type="search_document",
        inputs=inputs,
        embedding_types=["float"],
        output_dimension=8,
    )
    head = samples[0].embedding[:8]
    assert np.allclose(answer.embeddings.float_[0], head / np.linalg.norm(head), atol=1e-5)


def test_errors_arrive_as_its_own(client, model):
    with pytest.raises(cohere.errors.UnprocessableEntityError) as caught:
        client.embed(
            model=model, input_type="search_query", texts=["a text"], embedding_types=["float"]
        )
    assert "mlcd export MODEL OUT --text" in caught.value.body["message"]
    for images in (["data:image/png;base64,AAAA"], ["data:image/png;base64,AAAA"] * 65):
        with pytest.raises(cohere.errors.BadRequestError):
            client.embed(model=model, input_type="image", images=images, embedding_types=["float"])
    with pytest.raises(cohere.errors.UnprocessableEntityError):
        client.embed(model=model, input_type="image", images=["a text"], embedding_types=["float"])
    with pytest.raises(cohere.errors.NotFoundError):
        client.embed(model="absent", input_type="image", images=["data:image/png;base64,AA=="])
