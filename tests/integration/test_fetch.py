"""Images by URL through the real server, from a real host on loopback."""

import base64
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.image_host import ImageHost, endless, ok, redirect, status
from tests.integration.bodies import data_uri, files
from tests.integration.running import serving, until

SECRET = "SECRET"
LOOPBACK = {"allow": "127.0.0.1", "networks": "127.0.0.0/8"}


@pytest.fixture(scope="module")
def host(picture):
    data = picture[1]
    with ImageHost({}) as host:
        host.answers = {
            "/a.png": ok(data),
            f"/a.png?token={SECRET}": ok(data, x_secret=SECRET),
            "/moved": redirect("/a.png", 301),
            "/text": ok(SECRET.encode(), "text/html"),
            "/damaged": ok(data[:60]),
            "/not-an-image": ok(SECRET.encode()),
            f"/absent?token={SECRET}": status(404),
            "/large": endless(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n", bytes(2**16)),
            "/slow": lambda _: host.wait(),
            "/inside": redirect(f"http://169.254.169.254/{SECRET}"),
        }
        yield host


@pytest.fixture(scope="module")
def fetching(journey, host, new_state):
    """A server that fetches from the host."""
    settings = LOOPBACK | {"ports": f"80,{host.port}", "timeout_s": 2}
    given = {f"fetch__{name}": value for name, value in settings.items()}
    limits = {"limits__max_body_bytes": 2**20, "limits__max_queued_bytes": 2**22}
    with serving(journey / "model", state_dir=new_state(), **given, **limits) as server:
        yield server


@pytest.fixture
def ask(fetching):
    with httpx.Client(base_url=fetching.url, timeout=30) as client:
        yield client.post


def embeddings(answer):
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


def test_every_dialect_takes_urls(ask, host, model, picture):
    url, expected = f"{host.url}/a.png", picture[2]
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    for body in (
        {"input": url},  # NIM
        {"input": [url], "modality": "image"},  # Infinity
        {"messages": [message]},  # vLLM
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]},
        {"input": [{"image": url}]},  # Jina
        {"input": [{"image_url": {"url": url}}]},
        {"input": [{"url": f"{host.url}/moved"}]},  # older LlamaIndex
    ):
        (row,) = embeddings(ask("/v1/embeddings", json={"model": model, **body}))
        assert row == pytest.approx(expected, abs=1e-5), body
    for images in (
        {"images": [url]},
        {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": url}}]}]},
    ):
        (row,) = ask("/v2/embed", json={"model": model, **images}).json()["embeddings"]["float"]
        assert row == pytest.approx(expected, abs=1e-5)
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [url]}
    answer = ask(f"/v2/models/{model}/infer", json={"inputs": [tensor]}).json()
    assert answer["outputs"][0]["data"] == pytest.approx(expected, abs=1e-5)
    by_file = ask("/v1/labels", files=files(picture[1])).json()
    assert ask("/v1/labels", json={"images": [url]}).json() == by_file
    found = ask("/v1/collections/demo/search", json={"images": [url]}).json()["results"][0][
        "matches"
    ]
    assert found[0]["similarity"] == pytest.approx(1.0, abs=1e-5)


def test_the_time_of_fetching_is_told_where_something_was_fetched(ask, host, picture):
    def stages(image):
        timing = ask("/v1/labels", json={"images": [image]}).headers["server-timing"]
        return {
            name: float(ms) for name, ms in (stage.split(";dur=") for stage in timing.split(", "))
        }

    fetched = stages(f"{host.url}/a.png")
    assert next(iter(fetched)) == "fetch"
    assert 0 < fetched["fetch"] <= fetched["total"]
    assert "fetch" not in stages(data_uri(picture[1]))


def test_own_routes_answer_for_each_url(ask, host, picture):
    bad = {"/text": "fetch-failed", f"/absent?token={SECRET}": "fetch-failed"}
    bad |= {"/slow": "fetch-late", "/large": "too-many-bytes", "/inside": "url-refused"}
    bad |= {"/damaged": "undecodable", "/not-an-image": "unsupported-format"}
    urls = [host.url + path for path in bad]
    given = [data_uri(picture[1]), *urls, "http://10.0.0.1/", f"http://{SECRET}@127.0.0.1/"]
    given.append(f"{host.url}/a.png")
    for route in ("/v1/labels", "/v1/collections/demo/search"):
        answer = ask(route, json={"images": given})
        body = answer.json()
        assert [result["index"] for result in body["results"]] == [0, len(given) - 1]
        reasons = [*bad.values(), "url-refused", "url-refused"]
        assert [error["type"] for error in body["errors"]] == reasons
        assert SECRET not in answer.text
        assert "10.0.0.1" not in answer.text


def test_other_routes_name_the_first_that_failed(ask, host, model):
    good, absent = f"{host.url}/a.png", f"{host.url}/absent?token={SECRET}"
    error = ask("/v1/embeddings", json={"model": model, "input": [good, absent, absent]}).json()[
        "error"
    ]
    assert (error["param"], error["code"]) == ("input[1]", "fetch-failed")
    answer = ask("/v2/embed", json={"model": model, "images": [good, good, absent]})
    assert (answer.status_code, "image 2" in answer.json()["message"]) == (422, True)
    answer = ask("/v1/labels", json={"images": [absent]}, headers={"Accept": "application/x-npy"})
    expected = (422, 0, "urn:mlcd:problem:fetch-failed")
    assert (answer.status_code, answer.json()["index"], answer.json()["type"]) == expected
    error = ask("/v1/embeddings", json={"model": model, "input": [f"{host.url}/large"]})
    told = error.status_code, error.json()["error"]["code"]
    assert told == (400, "too-many-bytes")  # as OpenAI's clients expect


def test_what_is_refused_anyway_is_not_fetched(ask, host, model):
    asked = len(host.asked)
    for input_ in ([f"{host.url}/a.png", "a text"], [f"{host.url}/a.png", "http://10.0.0.1/"]):
        answer = ask("/v1/embeddings", json={"model": model, "input": input_})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "input[1]")
    assert len(host.asked) == asked


def test_a_slow_host_holds_up_nobody_else(fetching, host, model, picture):
    """Its requests wait with nothing admitted; everything else is answered before the first of them
    ends.
    """
    body = {"images": [f"{host.url}/slow"] * 8}
    with ThreadPoolExecutor(10) as pool, httpx.Client(base_url=fetching.url, timeout=30) as client:
        slow = [
            pool.submit(httpx.post, f"{fetching.url}/v1/labels", json=body, timeout=30)
            for _ in range(10)
        ]
        until(lambda: host.most >= 8, 10)
        for number in range(5):
            other = data_uri(picture[1] + bytes([number]))  # in no cache
            image = {"model": model, "input": other}
            assert client.post("/v1/embeddings", json=image).status_code == 200
        assert fetching.metric('mlcd_held{of="images"}') == 0
        assert not any(future.done() for future in slow)
        for future in slow:
            assert {error["type"] for error in future.result().json()["errors"]} == {"fetch-late"}
    assert fetching.metric('mlcd_held{of="fetched_bytes"}') == 0


def test_a_client_that_leaves_ends_its_fetches(fetching, host):
    name = 'mlcd_fetch_duration_seconds_count{outcome="cancelled"}'
    before = fetching.metric(name)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{fetching.url}/v1/labels", json={"images": [f"{host.url}/slow"] * 3}, timeout=0.5
        )
    until(lambda: fetching.metric(name) == before + 3, 5)


def test_nothing_of_a_url_or_of_what_a_host_sent_is_in_the_log(journey, host):
    settings = LOOPBACK | {"ports": host.port, "timeout_s": 1}
    given = {f"fetch__{name}": value for name, value in settings.items()}
    with serving(journey / "model", **given) as server:
        urls = [f"{host.url}{path}" for path in host.answers]
        urls += [f"http://{SECRET}.example/", f"http://{SECRET}@x/"]
        answer = httpx.post(f"{server.url}/v1/labels", json={"images": urls}, timeout=30)
        assert SECRET not in answer.text + httpx.get(f"{server.url}/metrics").text
        _, output = server.stop()
    assert SECRET not in output
    assert "example" not in output
    assert base64.b64encode(SECRET.encode()).decode() not in output
    assert "169.254" not in output
