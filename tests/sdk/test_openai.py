"""openai-python, LangChain and LlamaIndex, unchanged."""

import asyncio

import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="unused") as client:
        yield client


def test_its_default_is_base64_and_gives_the_stored_embeddings(client, model, samples):
    answer = client.embeddings.create(model=model, input=[sample.uri for sample in samples])
    assert [row.index for row in answer.data] == [0, 1, 2]
    assert all(
        sample.is_embedding(row.embedding) for sample, row in zip(samples, answer.data, strict=True)
    )
    raw = client.embeddings.with_raw_response.create(model=model, input=samples[0].uri)
    assert isinstance(raw.http_response.json()["data"][0]["embedding"], str)


def test_floats_and_dimensions(client, model, samples):
    floats = client.embeddings.create(model=model, input=samples[0].uri, encoding_format="float")
    assert samples[0].is_embedding(floats.data[0].embedding)
    short = (
        client.embeddings.create(model=model, input=samples[0].uri, dimensions=4).data[0].embedding
    )
    head = samples[0].embedding[:4]
    assert np.allclose(short, head / np.linalg.norm(head), atol=1e-5)


def test_the_async_client(server, model, samples):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="unused") as client:
            return await asyncio.gather(
                *(client.embeddings.create(model=model, input=one.uri) for one in samples)
            )

    answers = asyncio.run(ask())
    assert all(
        sample.is_embedding(answer.data[0].embedding)
        for sample, answer in zip(samples, answers, strict=True)
    )


def test_errors_arrive_as_its_own(client, model, samples):
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.embeddings.create(model=model, input=[samples[0].uri, "a text"])
    assert (caught.value.param, caught.value.code) == ("input[1]", "no-text-tower")
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=model, input=[samples[0].uri, "data:image/png;base64,AAAA"])
    assert (caught.value.param, caught.value.code) == ("input[1]", "unsupported-format")
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=model, input=[samples[0].uri] * 65)
    assert caught.value.code == "too-large"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="absent", input=samples[0].uri)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")
    assert client.models.retrieve(model).id == model


def test_langchain(server, model, samples):
    given = {"base_url": f"{server}/v1", "api_key": "unused", "model": model}
    embeddings = OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    rows = embeddings.embed_documents([sample.uri for sample in samples])
    assert all(sample.is_embedding(row) for sample, row in zip(samples, rows, strict=True))
    assert samples[1].is_embedding(embeddings.embed_query(samples[1].uri))


def test_tokens_are_refused_with_the_switch_that_mends_it(client, model):
    """LangChain sends tokens without the switch; its own tokenizer would have to be downloaded."""
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(model=model, input=[[9906, 1917]])


def test_llama_index(server, model, samples):
    embedding = OpenAIEmbedding(model_name=model, api_base=f"{server}/v1", api_key="unused")
    rows = embedding.get_text_embedding_batch([sample.uri for sample in samples])
    assert all(sample.is_embedding(row) for sample, row in zip(samples, rows, strict=True))
