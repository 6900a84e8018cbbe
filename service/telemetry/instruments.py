"""The kinds of metrics, with the units and buckets that all metrics share."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

_SECOND_BUCKETS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
_BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128)


class Instruments:
    """Creates the metrics of one registry, and calls the callbacks that set some of its gauges."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._callbacks: dict[Gauge, Callable[[], float]] = {}

    def counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, registry=self._registry)

    def seconds(self, name: str, meaning: str, *labels: str) -> Histogram:
        return Histogram(name, meaning, labels, buckets=_SECOND_BUCKETS, registry=self._registry)

    def batches(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=_BATCH_BUCKETS, registry=self._registry)

    def summary(self, name: str, meaning: str, *labels: str) -> Summary:
        return Summary(name, meaning, labels, registry=self._registry)

    def gauge(self, name: str, meaning: str, *labels: str, mode: str = "livesum") -> Gauge:
        """Returns a new gauge. mode: how to aggregate the values of several processes."""
        return Gauge(
            name,
            meaning,
            labels,
            registry=self._registry,
            multiprocess_mode=mode,  # type: ignore[arg-type]
        )

    def set_callback(self, gauge: Gauge, value: Callable[[], float]) -> None:
        """Sets or replaces the callback of a gauge. value: called by `update_gauges`."""
        self._callbacks[gauge] = value

    def update_gauges(self) -> None:
        """Calls all callbacks, and sets their gauges."""
        for gauge, value in self._callbacks.items():
            gauge.set(value())
