"""The metrics of the text tower."""

from collections.abc import Callable
from typing import Protocol

from prometheus_client import Gauge

from mlcd.service.telemetry.instruments import Instruments


class TowerMetrics(Protocol):
    """The metrics that the engine and the queue of one tower (image or text) report."""

    def engine_up(self, up: Callable[[], bool]) -> None: ...

    def engine_restarted(self) -> None: ...

    def queue_depth(self, stage: str, depth: Callable[[], int]) -> None: ...

    def batch(self, size: int, inference_s: float, wait_s: float) -> None: ...

    def observe_inference(self, seconds: float) -> None: ...

    def count_rejected(self, reason: str) -> None: ...

    def count_dropped(self, reason: str) -> None: ...


class TextMetrics:
    """The `TowerMetrics` of texts; a server without a text tower does not have them."""

    def __init__(self, instruments: Instruments, depths: Gauge, images: TowerMetrics) -> None:
        """Registers the metrics.

        depths: gauge of all queues. images: also counts refused and dropped texts.
        """
        self._instruments, self._depths, self._images = instruments, depths, images
        self._texts = instruments.counter(
            "mlcd_texts_total", "Texts of requests: embedded, or rejected.", "outcome"
        )
        self._tokens = instruments.counter(
            "mlcd_tokens_total", "Tokens of embedded texts, as the model reads them."
        )
        self._tokenizations = instruments.seconds(
            "mlcd_tokenize_duration_seconds", "Time to tokenize the texts of a request."
        )
        self._waits = instruments.seconds(
            "mlcd_text_queue_wait_seconds", "Wait of a batch's first text for the engine."
        )
        self._batches = instruments.batches("mlcd_text_batch_size", "Texts per inference.")
        self._inferences = instruments.seconds(
            "mlcd_text_inference_duration_seconds", "Time of one inference of texts."
        )
        self._engines_up = instruments.gauge(
            "mlcd_text_engine_up", "Engines that can take texts, one per server process."
        )
        self._restarts = instruments.counter(
            "mlcd_text_engine_restarts_total", "Times the process of the text engine was replaced."
        )

    def texts(self, *, embedded: int, rejected: int, tokens: int) -> None:
        self._texts.labels("embedded").inc(embedded)
        self._texts.labels("rejected").inc(rejected)
        self._tokens.inc(tokens)

    def observe_tokenization(self, seconds: float) -> None:
        self._tokenizations.observe(seconds)

    def engine_up(self, up: Callable[[], bool]) -> None:
        self._instruments.set_callback(self._engines_up, up)

    def engine_restarted(self) -> None:
        self._restarts.inc()

    def queue_depth(self, stage: str, depth: Callable[[], int]) -> None:
        self._instruments.set_callback(self._depths.labels(f"text_{stage}"), depth)

    def batch(self, size: int, inference_s: float, wait_s: float) -> None:
        self._batches.observe(size)
        self._waits.observe(wait_s)
        self.observe_inference(inference_s)

    def observe_inference(self, seconds: float) -> None:
        self._inferences.observe(seconds)

    def count_rejected(self, reason: str) -> None:
        self._images.count_rejected(reason)

    def count_dropped(self, reason: str) -> None:
        self._images.count_dropped(reason)
