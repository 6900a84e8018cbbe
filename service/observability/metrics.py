"""Prometheus metrics of one server process."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)

_LAG_EVERY_S = 0.1


class Metrics:
    """Names start with `mlcd_`; units are base units."""

    def __init__(self, *, model: str, fingerprint: str, engine: str, precision: str) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "mlcd_requests_total", "Requests answered.", ["route", "status"], registry=self._registry
        )
        self._durations = Histogram(
            "mlcd_request_duration_seconds", "Time to answer.", ["route"], buckets=_SECONDS, registry=self._registry
        )
        self._decodes = Histogram(
            "mlcd_decode_duration_seconds",
            "Time to decode one image, queueing included.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._waits = Histogram(
            "mlcd_queue_wait_seconds",
            "Wait of a batch's first image for the engine.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batches = Histogram("mlcd_batch_size", "Images per inference.", buckets=_IMAGES, registry=self._registry)
        self._inferences = Histogram(
            "mlcd_inference_duration_seconds", "Time of one inference.", buckets=_SECONDS, registry=self._registry
        )
        self._rejections = Counter(
            "mlcd_rejected_total", "Images or requests refused.", ["reason"], registry=self._registry
        )
        self._drops = Counter("mlcd_dropped_total", "Admitted images not encoded.", ["reason"], registry=self._registry)
        self._held = Gauge(
            "mlcd_held", "What requests being answered hold: images, pixels, bytes.", ["of"], registry=self._registry
        )
        self._engine_up = Gauge("mlcd_engine_up", "Whether the engine can take batches.", registry=self._registry)
        self._restarts = Counter(
            "mlcd_engine_restarts_total", "Times the engine's process was replaced.", registry=self._registry
        )
        self._lags = Histogram(
            "mlcd_event_loop_lag_seconds",
            "How late the event loop wakes a timer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        info = Gauge(
            "mlcd_model_info",
            "The served model.",
            ["model", "fingerprint", "engine", "precision"],
            registry=self._registry,
        )
        info.labels(model, fingerprint, engine, precision).set(1)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._durations.labels(route).observe(seconds)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        with self._decodes.time():
            yield

    def batch(self, size: int, inference_s: float, wait_s: float) -> None:
        self._batches.observe(size)
        self._inferences.observe(inference_s)
        self._waits.observe(wait_s)

    def rejected(self, reason: str) -> None:
        self._rejections.labels(reason).inc()

    def dropped(self, reason: str) -> None:
        self._drops.labels(reason).inc()

    def held(self, of: str, amount: int) -> None:
        self._held.labels(of).set(amount)

    def engine_up(self, up: Callable[[], bool]) -> None:
        """up: asked whenever the metrics are read."""
        self._engine_up.set_function(up)

    def engine_restarted(self) -> None:
        self._restarts.inc()

    async def watch_loop(self) -> None:
        """Measure the event loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lags.observe(loop.time() - due)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
