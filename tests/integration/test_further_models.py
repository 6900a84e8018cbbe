"""Several models in one server: each answers as a server of its own, and falls alone."""

import base64
import io
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.conftest import refuse, run_mlcd
from tests.integration.running import asking, children, until


@pytest.fixture(scope="module")
def both(journey, starter):
    """A server of raw pixels, with the journey's model, the starter and hog beside it."""
    named = f"vit={journey / 'model'},words={starter},h=hog"
    with asking("pixels", models=named, cache__memory_bytes=0) as running:
        yield running


@pytest.fixture(scope="module")
def image(digits):
    return next(digits.rglob("*.png")).read_bytes()


def uri(image):
    return "data:image/png;base64," + base64.b64encode(image).decode()


def ask_all(client, name, image, *, texts):
    """The answers of every route that takes a model, without what differs between two runs."""
    chosen = {"params": {"model": name}}
    files = {"files": image}
    npy = {"accept": "application/x-npy"}
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [uri(image)]}
    answers = [
        client.post("/v1/images/embed", files=files, headers=npy, **chosen),
        client.post("/v1/labels", files=files, **chosen),
        client.post("/v1/embeddings", json={"model": name, "input": [uri(image)]}),
        client.post(
            "/v2/embed",
            json={
                "model": name,
                "images": [uri(image)],
                "input_type": "image",
                "embedding_types": ["float"],
            },
        ),
        client.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]}),
        client.get(f"/v2/models/{name}"),
    ]
    if texts:
        names = {"images": [uri(image)], "names": ["a digit", "a dog"]}
        answers += [
            client.post("/v1/texts/embed", json={"texts": ["a dog"]}, headers=npy, **chosen),
            client.post("/v1/classify", json=names, **chosen),
            client.post("/v1/embeddings", json={"model": name, "input": ["a dog"]}),
        ]
    return answers


def essence(answer):
    body = answer.content
    if "json" in answer.headers["content-type"]:
        body = {
            key: value
            for key, value in answer.json().items()
            if key not in ("id", "request_id", "meta", "instance")
        }
    return answer.status_code, answer.headers["x-mlcd-fingerprint"], body


@pytest.mark.parametrize(("name", "texts"), [("vit", False), ("words", True)])
def test_each_answers_as_a_server_of_its_own(both, journey, starter, image, name, texts):
    _, client = both
    beside = ask_all(client, name, image, texts=texts)
    spec = journey / "model" if name == "vit" else starter
    with asking(spec, cache__memory_bytes=0) as (_, alone):
        own_name = alone.get("/v1/models").json()["data"][0]["id"]
        expected = ask_all(alone, own_name, image, texts=texts)
    assert {answer.headers["x-mlcd-model"] for answer in beside} == {name}
    has_centers = name == "vit"
    statuses = [200, 200 if has_centers else 404] + [200] * (len(beside) - 2)
    assert [answer.status_code for answer in beside] == statuses
    for answer, other in zip(beside, expected, strict=True):
        renamed = str(essence(other)).replace(own_name, name)
        assert str(essence(answer)) == renamed


def test_the_models_are_listed_and_others_are_not_found(both, image):
    _, client = both
    listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert listed == ["pixels", "vit", "words", "h"]
    assert client.get("/v1/models/h").json()["id"] == "h"
    for answer in (
        client.post("/v1/images/embed?model=x", files={"files": image}),
        client.post("/v1/embeddings", json={"model": "x", "input": [uri(image)]}),
        client.get("/v2/models/x/ready"),
        client.get("/metrics?model=x"),
    ):
        assert answer.status_code == 404
        assert "use pixels or vit or words or h" in answer.text
    # Collections are of the server's own model.
    assert client.get("/v1/info").json()["model"] == "pixels"
    assert client.get("/v2/models/h/ready").status_code == 200
    client.post("/v1/images/embed?model=h", files={"files": image})
    assert client.get("/v1/models/h").json()["loaded"]
    numbers = client.get("/metrics?model=h").text
    assert 'mlcd_images_total{outcome="embedded"}' in numbers
    assert 'model="h"' in numbers


def test_one_killed_engine_leaves_the_other_model_alone(image):
    settings, files = {"models": "h=hog", "cache__memory_bytes": 0}, {"files": image}
    with asking("pixels", **settings) as (server, client):
        engine_of_pixels = children(server.process.pid)

        def embed_by_hog():
            return client.post("/v1/images/embed?model=h", files=files)

        assert embed_by_hog().status_code == 200
        (engine_of_hog,) = {*children(server.process.pid)} - {*engine_of_pixels}
        stopping = threading.Event()

        answers = {"": [], "?model=h": []}

        def load(query):
            statuses = answers[query]
            with httpx.Client(base_url=server.url, timeout=30) as own:
                while not stopping.is_set():
                    answer = own.post(f"/v1/images/embed{query}", files={"files": image})
                    statuses.append(answer.status_code)

        with ThreadPoolExecutor(2) as pool:
            loads = [pool.submit(load, query) for query in ("", "?model=h")]
            time.sleep(0.5)
            os.kill(engine_of_hog, signal.SIGKILL)
            until(lambda: len({*children(server.process.pid)} - {engine_of_hog}) == 2, 30)
            until(lambda: embed_by_hog().status_code == 200, 30)
            assert {*answers[""]} == {200}  # its own engine is killed only now
            os.kill(engine_of_pixels[-1], signal.SIGKILL)
            # even while the server's own engine is down
            assert embed_by_hog().status_code == 200
            until(lambda: client.post("/v1/images/embed", files=files).status_code == 200, 30)
            stopping.set()
            for each in loads:
                each.result()
        assert {status for statuses in answers.values() for status in statuses} <= {200, 503}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("hog", "models must be name=model, with commas"),
        ("a=hog,a=pixels", "different names, got a twice"),
        ("a b=hog", "cannot name a model"),
        ("pixels=hog", "must not use the name of MLCD_MODEL, pixels"),
        ("a=/no/such/model", "the model /no/such/model does not exist"),
        ("a=startr", "the model startr does not exist"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(value, told):
    environment = {**os.environ, "MLCD_MODELS": value}
    refuse("serve --model pixels --port 0", contains=told, run=run_mlcd, env=environment)


def test_several_processes_are_refused():
    environment = {**os.environ, "MLCD_MODELS": "h=hog", "MLCD_PROCESSES": "2"}
    refuse(
        "serve --model pixels --port 0",
        contains="one server process",
        run=run_mlcd,
        env=environment,
    )


def test_an_npy_row_is_the_models_own(both, image):
    _, client = both
    options = {"files": {"files": image}, "headers": {"accept": "application/x-npy"}}
    rows = [
        client.post(f"/v1/images/embed{query}", **options).content for query in ("", "?model=h")
    ]
    pixels, hog = (np.load(io.BytesIO(row)) for row in rows)
    assert (pixels.shape, hog.shape) == ((1, 768), (1, 1764))
