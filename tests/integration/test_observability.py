"""The logs and traces of a real server, and its answers' statements about itself."""

import http.server
import json
import os
import re
import threading

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.integration.bodies import files
from tests.integration.running import Server, asking, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def lines_of(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture
def logging_server():
    server = Server("fake:latency_ms=5,sick_s=0", engine="fake", log__format="json").wait_ready()
    yield server
    server.process.kill()
    server.process.communicate()


def test_one_line_for_each_request_and_nothing_of_what_it_brought(logging_server, photo):
    url = logging_server.url
    ids = {"X-Request-Id": "mine.1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    ids |= {"Authorization": "Bearer mlcd_KEY"}
    httpx.post(f"{url}/v1/images/embed", files=files(photo, b"PAYLOAD"), headers=ids)
    kind = {"Content-Type": "text/SECRET"}
    httpx.post(f"{url}/v1/labels?top=SECRET", content=b"PAYLOAD", headers=kind)
    odd = {"X-Request-Id": "SECRET SECRET", "traceparent": f"00-{'0' * 32}-{PARENT}-01"}
    httpx.get(f"{url}/SECRET/x", headers=odd)
    httpx.get(f"{url}/health/ready")
    _, output = logging_server.stop()
    for secret in ("SECRET", "PAYLOAD", "KEY", "?"):
        assert secret not in output
    embedded, refused, unknown = lines_of(output)
    told = {"level": "info", "logger": "mlcd.access", "request_id": "mine.1", "method": "POST"}
    told |= {"route": "/v1/images/embed", "status": 200, "images": 2}
    told |= {"trace_id": TRACE, "span_id": PARENT}
    assert embedded.items() >= told.items()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}\+00:00", embedded["time"])
    assert embedded["ms"] > 5
    assert (refused["status"], "images" in refused, "trace_id" in refused) == (400, False, False)
    assert (unknown["route"], unknown["status"], "trace_id" in unknown) == ("other", 404, False)


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    def do_POST(self):
        message = ExportTraceServiceRequest.FromString(
            self.rfile.read(int(self.headers["Content-Length"]))
        )
        for resource in message.resource_spans:
            of_all = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.server.spans += [
                (of_all, span) for scope in resource.scope_spans for span in scope.spans
            ]
        self.server.paths.add(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.spans, server.paths = [], set()
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_spans_reach_a_collector(collector, journey, photo):
    with serving(journey / "model", tracing__endpoint=collector.url) as server:
        sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "traced"}
        answer = httpx.post(
            f"{server.url}/v1/labels", files=files(photo, b"x"), headers=sent, timeout=30
        )
        assert answer.status_code == 200
        httpx.get(f"{server.url}/nowhere")
    # The end sends what is left.
    assert collector.paths == {"/v1/traces"}
    of_all, _ = collector.spans[0]
    assert of_all["service.name"] == "mlcd"
    spans = {span.name: span for _, span in collector.spans}
    found = {"POST /v1/labels", "GET other", "decode", "queue", "inference", "labels"}
    assert found <= spans.keys()
    assert not [name for name in spans if "health" in name]
    request = spans["POST /v1/labels"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    attributes = {
        pair.key: pair.value.int_value or pair.value.string_value for pair in request.attributes
    }
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/labels",
        "http.response.status_code": 200,
        "mlcd.request_id": "traced",
        "mlcd.images": 2,
        "mlcd.fingerprint": answer.headers["x-mlcd-fingerprint"],
    }
    stages = [spans[name] for name in ("decode", "queue", "inference", "labels")]
    for stage in stages:
        assert (stage.trace_id, stage.parent_span_id) == (request.trace_id, request.span_id)
        span = stage.start_time_unix_nano, stage.end_time_unix_nano
        within = request.start_time_unix_nano - 1e6, *span, request.end_time_unix_nano + 1e6
        assert [*within] == sorted(within)
    starts = [stage.start_time_unix_nano for stage in stages]
    assert starts == sorted(starts)
    timings = dict(re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"]))
    inference = spans["inference"]
    lasted_ms = (inference.end_time_unix_nano - inference.start_time_unix_nano) / 1e6
    assert lasted_ms == pytest.approx(float(timings["inference"]), abs=0.2)
    assert spans["GET other"].trace_id != request.trace_id


def test_a_collector_that_is_not_there_changes_nothing(photo):
    with serving(
        "fake:latency_ms=5", engine="fake", tracing__endpoint="http://127.0.0.1:9"
    ) as server:
        answer = httpx.post(f"{server.url}/v1/images/embed", files=files(photo), timeout=30)
        assert answer.status_code == 200


def test_the_caller_decides_what_is_traced(collector, photo):
    settings = {"tracing__endpoint": collector.url, "tracing__sample": 0}
    with serving("fake:latency_ms=5", engine="fake", **settings) as server:
        for flag in ("00", "01"):
            sent = {"traceparent": f"00-{TRACE}-{PARENT}-{flag}", "X-Request-Id": flag}
            httpx.post(
                f"{server.url}/v1/images/embed", files=files(photo), headers=sent, timeout=30
            )
        httpx.post(f"{server.url}/v1/images/embed", files=files(photo), timeout=30)
    pairs = [pair for _, span in collector.spans for pair in span.attributes]
    assert {pair.value.string_value for pair in pairs if "request_id" in pair.key} == {"01"}


@pytest.fixture
def own_client(journey, new_state):
    """A client of a server that may lose its collection."""
    with asking(journey / "model", state_dir=new_state()) as (_, client):
        yield client


def test_every_answer_of_every_route_says_what_it_was_made_with(own_client):
    """The routes come from the API document, so that none is forgotten; refusals are included."""
    client = own_client
    info = client.get("/v1/info").json()
    asked = 0
    for path, item in client.get("/openapi.json").json()["paths"].items():
        for method in item:
            for value in ("1", info["model"], "demo"):
                answer = client.request(method, re.sub(r"\{\w+\}", value, path))
                assert answer.headers["x-mlcd-model"] == info["model"], path
                assert answer.headers["x-mlcd-fingerprint"] == info["fingerprint"]
                assert answer.headers["x-mlcd-preprocess-version"] == "1"
                assert answer.headers["x-mlcd-centers"] == info["centers"]["digest"]
                assert answer.headers["x-request-id"]
                assert "total;dur=" in answer.headers["server-timing"]
                asked += 1
    assert asked > 40
    for path in ("/nowhere", "/docs", "/openapi.json", "/"):
        assert client.get(path).headers["x-mlcd-fingerprint"] == info["fingerprint"]


def test_a_server_on_one_core_computes_with_one_thread(journey, photo):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # as taskset does, handed down to what is started
    try:
        server = Server(journey / "model")
    finally:
        os.sched_setaffinity(0, allowed)
    try:
        server.wait_ready()
        for pool in ("engine", "decode", "compute", "blas"):
            assert server.metric(f'mlcd_threads{{of="{pool}"}}') == 1
        assert (
            httpx.post(f"{server.url}/v1/labels", files=files(photo), timeout=30).status_code == 200
        )
    finally:
        server.stop()
