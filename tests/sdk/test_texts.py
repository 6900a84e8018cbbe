"""Every client sends texts and images to one server, and gets what `mlcd embed` gives."""

import asyncio

import cohere
import httpx
import numpy as np
import openai
import pytest
import tritonclient.http as triton
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def name(towers):
    return httpx.get(f"{towers}/v1/models").json()["data"][0]["id"]


@pytest.fixture
def mixed(texts, pictures):
    """Texts and images in one list as they are sent, and the samples behind them."""
    samples = [texts[0], pictures[0], texts[1], pictures[1], texts[2]]
    return [sample.text or sample.uri for sample in samples], samples


def are_embeddings(rows, samples):
    return all(sample.is_embedding(row) for sample, row in zip(samples, rows, strict=True))


def test_openai(towers, name, mixed):
    given, samples = mixed
    with openai.OpenAI(base_url=f"{towers}/v1", api_key="unused") as client:
        packed = client.embeddings.create(model=name, input=given)
        floats = client.embeddings.create(model=name, input=given, encoding_format="float")
    for answer in (packed, floats):
        assert are_embeddings([row.embedding for row in answer.data], samples)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3


def test_openai_asynchronously(towers, name, mixed):
    given, samples = mixed

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{towers}/v1", api_key="unused") as client:
            return await asyncio.gather(
                *(client.embeddings.create(model=name, input=one) for one in given)
            )

    answers = asyncio.run(ask())
    assert are_embeddings([answer.data[0].embedding for answer in answers], samples)


def test_cohere(towers, name, texts, pictures):
    client = cohere.ClientV2(api_key="unused", base_url=towers)
    ask = {"model": name, "embedding_types": ["float"]}
    read = client.embed(**ask, input_type="search_query", texts=[one.text for one in texts])
    assert are_embeddings(read.embeddings.float_, texts)
    assert read.texts == [one.text for one in texts]
    assert read.meta.billed_units.input_tokens > 3
    seen = client.embed(**ask, input_type="image", images=[one.uri for one in pictures])
    assert are_embeddings(seen.embeddings.float_, pictures)
    inputs = [
        {"content": [{"type": "text", "text": texts[0].text}]},
        {"content": [{"type": "image_url", "image_url": {"url": pictures[0].uri}}]},
    ]
    both = client.embed(**ask, input_type="search_document", inputs=inputs)
    assert are_embeddings(both.embeddings.float_, [texts[0], pictures[0]])


def test_langchain(towers, name, mixed):
    given, samples = mixed
    embeddings = OpenAIEmbeddings(
        base_url=f"{towers}/v1", api_key="unused", model=name, check_embedding_ctx_length=False
    )
    assert are_embeddings(embeddings.embed_documents(given), samples)
    assert samples[0].is_embedding(embeddings.embed_query(given[0]))


def test_llama_index(towers, name, mixed):
    given, samples = mixed
    embedding = OpenAIEmbedding(model_name=name, api_base=f"{towers}/v1", api_key="unused")
    assert are_embeddings(embedding.get_text_embedding_batch(given), samples)
    assert samples[0].is_embedding(embedding.get_query_embedding(given[0]))


@pytest.mark.parametrize("binary", [True, False])
def test_triton(towers, name, texts, binary):
    with triton.InferenceServerClient(towers.removeprefix("http://")) as client:
        given = triton.InferInput("text", [len(texts)], "BYTES")
        words = np.array([one.text.encode() for one in texts], object)
        given.set_data_from_numpy(words, binary_data=binary)
        answer = client.infer(name, [given])
        assert are_embeddings(answer.as_numpy("embedding"), texts)


def test_a_model_of_images_refuses_texts_in_each_clients_own_error(server, model):
    way = "mlcd export MODEL OUT --text"
    openai_client = openai.OpenAI(base_url=f"{server}/v1", api_key="unused")
    langchain = OpenAIEmbeddings(
        base_url=f"{server}/v1", api_key="unused", model=model, check_embedding_ctx_length=False
    )
    llama = OpenAIEmbedding(model_name=model, api_base=f"{server}/v1", api_key="unused")
    for ask in (
        lambda: openai_client.embeddings.create(model=model, input="two dogs"),
        lambda: langchain.embed_query("two dogs"),
        lambda: llama.get_text_embedding("two dogs"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=way) as caught:
            ask()
        assert caught.value.code == "no-text-tower"
    with pytest.raises(cohere.errors.UnprocessableEntityError) as refused:
        cohere.ClientV2(api_key="unused", base_url=server).embed(
            model=model, input_type="search_query", texts=["two dogs"], embedding_types=["float"]
        )
    assert way in refused.value.body["message"]
    with triton.InferenceServerClient(server.removeprefix("http://")) as client:
        given = triton.InferInput("text", [1], "BYTES")
        given.set_data_from_numpy(np.array([b"two dogs"], object))
        with pytest.raises(InferenceServerException, match=way):
            client.infer(model, [given])
