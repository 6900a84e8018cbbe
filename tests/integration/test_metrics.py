"""The numbers of /metrics against what clients counted themselves, with one and with two server
processes.
"""

import io
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.bodies import data_uri, files
from tests.integration.running import Server, until

MODEL = "fake:latency_ms=200"
PROBES = ("/metrics", "/health/live", "/health/ready")


def png(number):
    """Another picture for every number."""
    buffer = io.BytesIO()
    Image.new("RGB", (12, 10), (number % 256, number // 256 % 256, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def cut_off():
    buffer = io.BytesIO()
    Image.effect_noise((40, 40), 100).save(buffer, "PNG")
    return buffer.getvalue()[:500]


def scrape(url):
    """Samples by name and labels."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples, name, **labels):
    return samples.get((name, frozenset(labels.items())), 0.0)


def total(samples, name, **labels):
    """Over all labels that are not given."""
    return sum(
        number
        for (found, of), number in samples.items()
        if found == name and labels.items() <= dict(of).items()
    )


def settled(server, clients):
    """Samples once every answer is counted: a client may read an answer, and ask another process
    for the numbers, before the process that answered has counted it.
    """

    def counts():
        return sum(
            number
            for (name, labels), number in samples[-1].items()
            if name == "mlcd_requests_total" and dict(labels)["route"] not in PROBES
        )

    samples = []

    def holds():
        samples.append(scrape(server.url))
        held = [value(samples[-1], "mlcd_held", of=of) for of in ("images", "pixels", "bytes")]
        return counts() >= sum(clients.answers.values()) and not any(held)

    until(holds, 10, server)
    return samples[-1]


class Clients:
    """Ask, and count what comes back."""

    def __init__(self, url):
        self.url = url
        self.answers, self.embedded, self.rejected = Counter(), 0, Counter()

    def ask(self, route, path=None, *, client=httpx, **body):
        answer = client.request(
            "POST" if body else "GET", self.url + (path or route), timeout=60, **body
        )
        self.answers[route, str(answer.status_code)] += 1
        if answer.status_code == 200 and body:
            content = answer.json()
            self.embedded += len(content.get("results", content.get("data", [])))
            self.rejected.update(error["type"] for error in content.get("errors", []))
        return answer


@pytest.fixture(params=[1, 2])
def server(request):
    limits = {"max_images": 4, "max_queued_images": 4, "max_body_bytes": 10_000}
    given = {f"limits__{name}": value for name, value in limits.items()}
    given |= {"cache__memory_bytes": 1_000_000, "log__format": "json", "processes": request.param}
    running = Server(MODEL, engine="fake", max_batch=4, **given)
    running.num_processes = request.param
    try:
        running.wait_ready()
        until(lambda: value(scrape(running.url), "mlcd_processes") == request.param, 30, running)
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def test_every_number_is_what_clients_counted(server):
    before, clients = scrape(server.url), Clients(server.url)
    batches = 0
    for number in range(6):  # one after the other: a batch each
        clients.ask("/v1/images/embed", files=files(png(number)))
        batches += 1
    # one connection is one process: what it has embedded, it remembers
    with httpx.Client() as same:
        for _ in range(4):
            clients.ask("/v1/images/embed", client=same, files=files(png(1000)))
    clients.ask("/v1/images/embed", files=files(png(2000), b"no image", b"", cut_off()))
    model, (image, text) = MODEL, ({"Content-Type": kind} for kind in ("image/png", "text/plain"))
    clients.ask("/v1/embeddings", json={"model": model, "input": [data_uri(png(2002))]})
    refused = [
        clients.ask("/v1/embeddings", json={"model": "other", "input": "x"}),
        clients.ask("/v1/embeddings", json={"model": model, "input": [1, 2]}),
        clients.ask("/v1/images/embed", content=b"x" * 20_000, headers=image),
        clients.ask("/v1/images/embed", content=b"x", headers=text),
        clients.ask("/v1/models/{model}", "/v1/models/none"),
        clients.ask("other", "/nowhere?secret=1"),
    ]
    assert [answer.status_code for answer in refused] == [404, 400, 413, 415, 404, 404]
    crowd = [files(png(3000 + number)) for number in range(24)]  # more than it may hold
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda image: clients.ask("/v1/images/embed", files=image), crowd))
    after = settled(server, clients)

    def grown(name, **labels):
        return total(after, name, **labels) - total(before, name, **labels)

    counted = {
        (dict(labels)["route"], dict(labels)["status"]): number - before.get((name, labels), 0)
        for (name, labels), number in after.items()
        if name == "mlcd_requests_total"
    }
    assert {
        key: number for key, number in counted.items() if key[0] not in PROBES and number
    } == clients.answers
    assert grown("mlcd_request_duration_seconds_count", route="/v1/images/embed") == sum(
        number for (route, _), number in clients.answers.items() if route == "/v1/images/embed"
    )
    too_many = clients.answers["/v1/images/embed", "429"]
    assert too_many > 0
    assert grown("mlcd_rejected_total", reason="overloaded") == too_many
    assert clients.rejected == {"unsupported-format": 1, "empty": 1, "undecodable": 1}
    for reason, number in clients.rejected.items():
        assert grown("mlcd_rejected_total", reason=reason) == number
    assert grown("mlcd_images_total", outcome="embedded") == clients.embedded
    assert grown("mlcd_images_total", outcome="rejected") == 3
    # Of what was embedded, three answers came from memory.
    assert grown("mlcd_cache_requests_total", tier="memory", result="hit") == 3
    inferred = clients.embedded - 3
    assert grown("mlcd_batch_size_sum") == inferred
    concurrent = clients.answers["/v1/images/embed", "200"] - 6 - 4 - 1
    alone = batches + 1 + 1 + 1
    assert alone + concurrent / 4 <= grown("mlcd_batch_size_count") <= alone + concurrent
    for histogram in ("mlcd_inference_duration_seconds_count", "mlcd_queue_wait_seconds_count"):
        assert grown(histogram) == grown("mlcd_batch_size_count")
    # What the header already refuses is not decoded; what is cut off is.
    assert grown("mlcd_decode_duration_seconds_count", format="PNG") == inferred + 1
    assert [value(after, "mlcd_held", of=of) for of in ("images", "pixels", "bytes")] == [0, 0, 0]
    assert value(after, "mlcd_engine_up") == server.num_processes
    assert total(after, "mlcd_model_info") == 1
    assert not [name for name, labels in after if "pid" in dict(labels)]

    server.process.terminate()
    output, _ = server.process.communicate(timeout=30)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    logged = Counter(
        (line["route"], str(line["status"])) for line in lines if line["message"] == "request"
    )
    assert logged == clients.answers
    assert len({line["pid"] for line in lines}) == server.num_processes
    assert "secret" not in output
