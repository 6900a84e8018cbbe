"""Spans of requests, sent to an OpenTelemetry collector by OTLP over HTTP.

Imported only if a collector is configured.
"""

import threading
import time
from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mlcd.service.telemetry.request import RequestRecord
from mlcd.service.timings import TRACE_CLOSE_S, TRACE_EXPORT_S
from mlcd.version import __version__

_SERVER_FAULT: Final = 500
_INFERENCE: Final = "inference"


class RequestTracer:
    """Traces requests; a separate thread sends the spans, and drops spans that it cannot send."""

    def __init__(self, endpoint: str, *, sample: float, model: str) -> None:
        """Starts the tracer.

        endpoint: the collector's URL without the path. sample: share of requests to trace, from 0
        to 1, if the caller did not decide.
        """
        resource = Resource.create({"service.name": "mlcd", "service.version": __version__})
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample), resource=resource, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces", timeout=TRACE_EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mlcd.service", __version__)
        self._propagator = TraceContextTextMapPropagator()
        # OpenTelemetry's experimental attribute names for embeddings.
        self._inference_attributes = {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.request.model": model,
        }
        # Spans use Unix time, stages use time.perf_counter.
        self._epoch_s = time.time() - time.perf_counter()

    def begin(self, record: RequestRecord) -> Span:
        """Starts a span in the trace of `record`, and puts the span's id into its headers."""
        span = self._tracer.start_span(
            "request", self._propagator.extract(record.trace_headers), SpanKind.SERVER
        )
        record.trace_headers = {}
        self._propagator.inject(record.trace_headers, set_span_in_context(span))
        return span

    def end(
        self,
        span: Span,
        record: RequestRecord,
        *,
        method: str,
        route: str,
        status: int,
        fingerprint: str,
    ) -> None:
        """Ends the span. fingerprint: of the model that answered."""
        if span.is_recording():
            self._add_stages(set_span_in_context(span), record.stages)
            span.update_name(f"{method} {route}")
            span.set_attributes(
                {
                    "http.request.method": method,
                    "http.route": route,
                    "http.response.status_code": status,
                    "mlcd.request_id": record.request_id,
                    "mlcd.fingerprint": fingerprint,
                    **{f"mlcd.{name}": num for name, num in record.counts.items()},
                }
            )
            if status >= _SERVER_FAULT:
                span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Sends the remaining spans, within two seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        closing.start()
        closing.join(TRACE_CLOSE_S)

    def _add_stages(self, parent: Context, stages: Mapping[str, tuple[float, float]]) -> None:
        for stage, (started, ended) in stages.items():
            attributes = self._inference_attributes if stage == _INFERENCE else None
            child = self._tracer.start_span(
                stage, parent, attributes=attributes, start_time=self._to_epoch_ns(started)
            )
            child.end(self._to_epoch_ns(ended))

    def _to_epoch_ns(self, seconds: float) -> int:
        return int((self._epoch_s + seconds) * 1e9)
