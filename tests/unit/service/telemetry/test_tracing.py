import subprocess
import sys

import pytest

from mlcd.errors import ConfigInvalid
from mlcd.service.settings import Tracing, read_settings
from mlcd.service.telemetry.request import RequestRecord
from mlcd.service.telemetry.tracing import RequestTracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def tracer():
    tracer = RequestTracer("http://127.0.0.1:9", sample=1.0, model="m")
    yield tracer
    tracer._provider._active_span_processor._span_processors = ()  # nothing is sent from here
    tracer.close()


def test_what_is_called_for_a_request_carries_its_own_span(tracer):
    given = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    record = RequestRecord("r", given)
    span = tracer.begin(record)
    trace, span_id = record.trace_ids
    assert trace == TRACE
    assert span_id == f"{span.get_span_context().span_id:016x}" != PARENT
    assert record.trace_headers["tracestate"] == "vendor=1"


def test_a_request_without_a_trace_begins_one(tracer):
    first, second = RequestRecord("1"), RequestRecord("2")
    tracer.begin(first)
    tracer.begin(second)
    assert first.trace_ids[0] != second.trace_ids[0]


def test_nothing_of_it_is_loaded_unless_it_is_configured():
    code = (
        "import sys, mlcd.service.serve.cli, mlcd.service.serve.server; print([name for name in sys.modules "
        "if name.startswith('opentelemetry.sdk')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "endpoint",
    ["collector:4318", "http://user:secret@collector", "http://c/?key=secret", "file:///x"],
)
def test_an_endpoint_that_is_none_is_refused_without_repeating_it(monkeypatch, endpoint):
    monkeypatch.setenv("MLCD_TRACING__ENDPOINT", endpoint)
    with pytest.raises(ConfigInvalid, match="MLCD_TRACING__ENDPOINT") as caught:
        read_settings({"model": "hog"})
    assert "secret" not in str(caught.value)
    assert Tracing(endpoint="https://collector:4318/otlp").endpoint == "https://collector:4318/otlp"
