"""Texts on a server whose fake model knows the names of colors."""

import base64
import io
import json

import httpx
import numpy as np
import pytest
from PIL import Image

from mlcd.client import Client, RefusedInput
from mlcd.errors import InvalidInput, TextRejected
from tests.integration.bodies import data_uri
from tests.integration.running import asking, serving

MODEL = "fake:text=true,latency_ms=1"


def picture(color):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), color).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    state = tmp_path_factory.mktemp("texts")
    with serving(MODEL, engine="fake", state_dir=state, cache__memory_bytes=2**20) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def red(client):
    answer = client.post("/v1/images/embed", content=picture("red"), headers=PNG)
    return answer.json()["results"][0]["embedding"]


PNG = {"Content-Type": "image/png"}


def cosine(first, second):
    return float(np.dot(first, second) / np.linalg.norm(first) / np.linalg.norm(second))


def test_texts_are_embedded_where_images_are(client, red):
    answer = client.post("/v1/texts/embed", json={"texts": ["a red car", "blue", "a red car"]})
    content = answer.json()
    first, second, third = (one["embedding"] for one in content["results"])
    assert cosine(first, red) > 0.99
    assert cosine(second, red) < 0.5
    assert first == third
    assert (content["errors"], content["tokens"], content["dimension"]) == ([], 15, 8)
    stages = [stage.split(";")[0] for stage in answer.headers["server-timing"].split(", ")]
    assert stages == ["tokenize", "cache", "decode", "queue", "inference", "total"]


@pytest.mark.parametrize("accept", ["application/octet-stream", "application/x-npy"])
def test_texts_are_answered_as_a_matrix_and_a_bad_one_refuses_it(client, accept):
    given = {"texts": ["red", "green"]}
    rows = [
        one["embedding"] for one in client.post("/v1/texts/embed", json=given).json()["results"]
    ]
    answer = client.post("/v1/texts/embed", json=given, headers={"Accept": accept})
    if accept.endswith("npy"):
        found = np.load(io.BytesIO(answer.content))
    else:
        found = np.frombuffer(answer.content, "<f4").reshape(2, 8)
    assert found == pytest.approx(np.array(rows))
    bad = client.post("/v1/texts/embed", json={"texts": ["red", ""]}, headers={"Accept": accept})
    assert (bad.status_code, bad.json()["param"], bad.json()["index"]) == (422, "texts[1]", 1)
    assert bad.json()["type"] == "urn:mlcd:problem:empty"


def test_a_bad_text_fails_alone(client):
    texts = ["red", "", 7, None, "x" * 8193, "\x00", "שלום עולם", "\u202e right to left", " \n"]
    content = client.post("/v1/texts/embed", json={"texts": texts}).json()
    assert [one["index"] for one in content["results"]] == [0, 5, 6, 7]
    found = {error["index"]: error["type"] for error in content["errors"]}
    assert found == {1: "empty", 2: "not-a-string", 3: "not-a-string", 4: "too-long", 8: "empty"}


def test_texts_with_the_same_tokens_share_an_entry_of_the_cache(client, server):
    before = server.metric('mlcd_texts_total{outcome="embedded"}')
    inferred = server.metric("mlcd_text_batch_size_sum")
    long = "a text that is cut at thirty-two tokens, whatever comes "
    for end in ("now", "then"):
        assert client.post("/v1/texts/embed", json={"texts": [long + end]}).status_code == 200
    assert server.metric("mlcd_text_batch_size_sum") == inferred + 1
    assert server.metric('mlcd_texts_total{outcome="embedded"}') == before + 2


def test_a_collection_is_searched_by_words_and_centers_need_some(client):
    assert client.put("/v1/collections/colors").status_code == 201
    items = [{"id": name, "image": data_uri(picture(name))} for name in ("red", "green", "blue")]
    assert client.post("/v1/collections/colors/items", json={"items": items}).status_code == 200
    asked = {"texts": ["something green", "", "a blue thing"], "top": 1}
    content = client.post("/v1/collections/colors/search", json=asked).json()
    found = {one["index"]: one["matches"][0]["id"] for one in content["results"]}
    assert found == {0: "green", 2: "blue"}
    assert [error["type"] for error in content["errors"]] == ["empty"]
    both = client.post("/v1/collections/colors/search", json={**asked, "images": []})
    assert (both.status_code, both.json()["type"]) == (400, "urn:mlcd:problem:malformed-request")


NAMES = ["red", "green", "blue", "white"]


def test_images_are_classified_by_names(client):
    images = [data_uri(picture("blue")), "nonsense", data_uri(picture("red"))]
    content = client.post(
        "/v1/classify", json={"images": images, "names": NAMES, "top": 2, "templates": "simple"}
    ).json()
    assert content["calibration"] == {"scale": 100.0, "bias": None}
    assert [error["index"] for error in content["errors"]] == [1]
    best = {one["index"]: one["names"] for one in content["results"]}
    assert [best[0][0]["name"], best[2][0]["name"]] == ["blue", "red"]
    assert best[0][0]["probability"] > 0.99
    assert len(best[0]) == 2
    whole = client.post("/v1/classify", json={"images": images[:1], "names": NAMES}).json()
    assert sum(one["probability"] for one in whole["results"][0]["names"]) == pytest.approx(1)


def test_classes_are_means_of_unit_prompts(client, red):
    templates = ["a {} thing", "{} and white", "{}"]
    prompts = [template.replace("{}", name) for name in NAMES for template in templates]
    rows = client.post("/v1/texts/embed", json={"texts": prompts}).json()["results"]
    means = np.array([row["embedding"] for row in rows]).reshape(4, 3, -1).mean(axis=1)
    cosines = means @ np.array(red) / np.linalg.norm(means, axis=1)
    weights = np.exp(100 * cosines)
    asked = {"embeddings": [red], "names": NAMES, "templates": templates}
    found = client.post("/v1/classify", json=asked).json()["results"][0]["names"]
    for name, cosine_of, weight in zip(NAMES, cosines, weights / weights.sum(), strict=True):
        (one,) = [one for one in found if one["name"] == name]
        assert one["similarity"] == pytest.approx(cosine_of, abs=1e-5)
        assert one["probability"] == pytest.approx(weight, abs=1e-4)
    assert [one["similarity"] for one in found] == sorted(
        (one["similarity"] for one in found), reverse=True
    )


def test_a_form_is_classified_too(client):
    files = [("files", ("a.png", picture("green"), "image/png"))]
    fields = {"names": json.dumps(NAMES), "templates": "clip", "top": "1"}
    content = client.post("/v1/classify", files=files, data=fields).json()
    assert [one["name"] for one in content["results"][0]["names"]] == ["green"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"names": NAMES}, 400, None),
        ({"names": [], "embeddings": [[1] * 8]}, 400, "names"),
        ({"names": ["red", ""], "embeddings": [[1] * 8]}, 422, "names[1]"),
        ({"names": ["red", "blue", "red"], "embeddings": [[1] * 8]}, 400, "names[2]"),
        ({"names": ["red", 7], "embeddings": [[1] * 8]}, 400, "names.1"),
        ({"names": NAMES, "templates": "poems", "embeddings": [[1] * 8]}, 400, "templates"),
        ({"names": NAMES, "templates": ["no place"], "embeddings": [[1] * 8]}, 400, "templates"),
        ({"names": NAMES, "templates": ["{0} {}{}"], "embeddings": [[1] * 8]}, 400, "templates"),
        ({"names": NAMES, "texts": ["red"]}, 400, "texts"),
        ({"names": ["x"] * 2049, "embeddings": [[1] * 8]}, 413, None),
        ({"names": ["x"] * 500, "templates": "clip", "embeddings": [[1] * 8]}, 413, None),
        ({"names": NAMES, "top": 0, "embeddings": [[1] * 8]}, 400, "top"),
    ],
)
def test_a_classification_that_cannot_be_made_is_refused(client, body, status, param):
    answer = client.post("/v1/classify", json=body)
    assert (answer.status_code, answer.json().get("param")) == (status, param), answer.text


def test_openai_takes_texts_and_images_in_one_list(client, red):
    model = client.get("/v1/models").json()["data"][0]["id"]
    uri = data_uri(picture("red"))
    ask = {"model": model, "input": ["red", uri, {"text": uri}, {"image": uri}]}
    content = client.post("/v1/embeddings", json=ask).json()
    rows = [one["embedding"] for one in content["data"]]
    assert [one["index"] for one in content["data"]] == [0, 1, 2, 3]
    assert rows[1] == rows[3] == red
    assert cosine(rows[0], red) > 0.99
    assert rows[2] != rows[1]
    assert content["usage"] == {"prompt_tokens": 33, "total_tokens": 33}
    packed = client.post(
        "/v1/embeddings", json={**ask, "encoding_format": "base64", "dimensions": 3}
    ).json()["data"]
    short = np.frombuffer(base64.b64decode(packed[1]["embedding"]), "<f4")
    assert short == pytest.approx(np.array(red[:3]) / np.linalg.norm(red[:3]), abs=1e-5)
    for body in (
        {"input": uri, "modality": "text"},
        {"input": [uri, uri], "modality": ["text", "image"]},
        {"messages": [{"role": "user", "content": "red"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "red"}]}]},
    ):
        content = client.post("/v1/embeddings", json={"model": model, **body}).json()
        assert content["usage"]["prompt_tokens"] in (1, 32)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": ["red", ""]}, 422, "input[1]"),
        ({"input": ["red", "data:image/png;base64,AAAA", ""]}, 400, "input[1]"),
        ({"input": ["red"] * 2049}, 400, None),
        ({"input": "x" * 40, "truncate": "NONE"}, 422, "input[0]"),
    ],
)
def test_openai_refuses_a_bad_text_by_its_place(client, body, status, param):
    model = client.get("/v1/models").json()["data"][0]["id"]
    answer = client.post("/v1/embeddings", json={"model": model, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_cohere_takes_texts_and_inputs(client, red):
    model = client.get("/v1/models").json()["data"][0]["id"]
    ask = {"model": model, "input_type": "search_query", "embedding_types": ["float", "int8"]}
    content = client.post("/v2/embed", json={**ask, "texts": ["red", "a blue one"]}).json()
    assert content["texts"] == ["red", "a blue one"]
    assert content["meta"]["billed_units"] == {"input_tokens": 8}
    assert cosine(content["embeddings"]["float"][0], red) > 0.99
    inputs = [
        {"content": [{"type": "text", "text": "red"}]},
        {"content": [{"type": "image_url", "image_url": {"url": data_uri(picture("red"))}}]},
    ]
    mixed = client.post("/v2/embed", json={**ask, "inputs": inputs}).json()
    assert mixed["embeddings"]["float"] == [content["embeddings"]["float"][0], red]
    assert mixed["meta"]["billed_units"] == {"images": 1, "input_tokens": 1}


def test_kserve_takes_texts_in_json_and_in_binary(client):
    model = client.get("/v1/models").json()["data"][0]["id"]
    described = client.get(f"/v2/models/{model}").json()
    assert {"name": "text", "datatype": "BYTES", "shape": [-1]} in described["inputs"]
    tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["red", "blue"]}
    content = client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]}).json()
    output = content["outputs"][0]
    assert output["shape"] == [2, 8]
    raw = b"".join(len(text).to_bytes(4, "little") + text for text in (b"red", b"blue"))
    head = {**tensor, "parameters": {"binary_data_size": len(raw)}}
    del head["data"]
    text = json.dumps({"inputs": [head]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    binary = client.post(f"/v2/models/{model}/infer", content=text + raw, headers=headers).json()
    assert binary["outputs"][0]["data"] == output["data"]
    broken = raw.replace(b"blue", b"bl\xffe")
    bad = client.post(f"/v2/models/{model}/infer", content=text + broken, headers=headers)
    assert (bad.status_code, "valid Unicode" in bad.json()["error"]) == (422, True)


def test_info_says_that_the_model_takes_texts(client):
    info = client.get("/v1/info").json()
    assert info["texts"] == {
        "context_length": 32,
        "engine": "fake",
        "precision": "fp32",
        "calibration": {"scale": 100.0, "bias": None},
    }
    assert {"max_texts", "max_text_chars", "max_prompts"} <= info["limits"].keys()


def test_a_model_of_images_refuses_texts_with_the_way_to_them():
    with asking("fake:latency_ms=1", engine="fake") as (_, client):
        model = client.get("/v1/models").json()["data"][0]["id"]
        assert client.get("/v1/info").json()["texts"] is None
        own = [
            client.post("/v1/texts/embed", json={"texts": ["a"]}),
            client.post("/v1/classify", json={"names": ["a"], "embeddings": [[1] * 8]}),
        ]
        for answer in own:
            assert answer.status_code == 422
            assert answer.json()["type"] == "urn:mlcd:problem:no-text-tower"
            assert "mlcd export MODEL OUT --text" in answer.json()["detail"]
        openai = client.post("/v1/embeddings", json={"model": model, "input": "a text"})
        assert (openai.status_code, openai.json()["error"]["code"]) == (422, "no-text-tower")
        cohere = client.post("/v2/embed", json={"model": model, "texts": ["a"]})
        assert (cohere.status_code, set(cohere.json())) == (422, {"id", "message"})
        tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["red"]}
        kserve = client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})
        assert (kserve.status_code, set(kserve.json())) == (422, {"error"})
        assert "mlcd_text_engine_up" not in client.get("/metrics").text


def test_pairs_are_judged_alone_where_the_model_has_a_bias(client):
    with asking(f"{MODEL},bias=-90", engine="fake") as (_, alone):
        asked = {"images": [data_uri(picture("red"))], "names": ["red", "red thing", "blue"]}
        content = alone.post("/v1/classify", json=asked).json()
        assert content["calibration"] == {"scale": 100.0, "bias": -90.0}
        found = content["results"][0]["names"]
        for one in found:
            expected = 1 / (1 + np.exp(90 - 100 * one["similarity"]))
            assert one["probability"] == pytest.approx(expected, abs=1e-4)
        assert sum(one["probability"] for one in found) > 1.9


def test_the_python_client_speaks_of_texts(server, red):
    with Client(server.url, batch_size=2) as mlcd_client:
        assert mlcd_client.info().texts.context_length == 32
        texts = ["red", "", 7, "blue", *(f"text {number}" for number in range(40)), "\ud800"]
        embedded = mlcd_client.embed_texts(texts)
        assert embedded.vectors[0] == pytest.approx(np.array(red), abs=0.05)
        reasons = {index: error.reason for index, error in embedded.errors.items()}
        assert reasons == {1: "empty", 2: "not-a-string", 44: "not-unicode"}
        assert all(isinstance(error, TextRejected) for error in embedded.errors.values())
        assert np.isnan(embedded.vectors[[1, 2, 44]]).all()
        with pytest.raises(TextRejected, match="text 1: the text is empty"):
            mlcd_client.embed_texts(texts, strict=True)
        with pytest.raises(InvalidInput, match="put the one text into a list"):
            mlcd_client.embed_texts("red")
        (first, _) = mlcd_client.embed_texts_each(["red", ""])
        assert first == pytest.approx(embedded.vectors[0])

        found = mlcd_client.classify([picture("green"), b"no image"], names=NAMES, top=2)
        assert found.names[0][0] == "green"
        assert found.probabilities[0, 0] > 0.99
        assert (list(found.errors), found.names[1]) == ([1], [])
        assert np.isnan(found.probabilities[1]).all()
        again = mlcd_client.classify(embeddings=[red], names=NAMES, templates=["a {} one", "{}"])
        assert again.names[0][0] == "red"
        with pytest.raises(RefusedInput) as caught:
            mlcd_client.classify(embeddings=[red], names=["red", ""])
        assert caught.value.problem.param == "names[1]"

        mlcd_client.create_collection("client")
        mlcd_client.add("client", NAMES, [picture(name) for name in NAMES])
        assert mlcd_client.search("client", text="a blue one", top=1).matches[0][0].id == "blue"
        several = mlcd_client.search("client", texts=["white", "", "red"], top=1)
        assert [[match.id for match in one] for one in several.matches] == [["white"], [], ["red"]]
        assert isinstance(several.errors[1], TextRejected)
        with pytest.raises(InvalidInput, match="exactly one of"):
            mlcd_client.search("client", text="red", texts=["red"])
