"""The engine of a Triton server.

Triton batches requests itself, so every item is sent as a separate request, without a second
batcher.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ConfigInvalid, DeadlineExceeded, Overloaded, Unavailable
from mlcd.extras import install_command
from mlcd.models.tokenizer import Tokenizer
from mlcd.service.inference.contract import Row
from mlcd.service.inference.engine_labels import EngineLabels, find_requested_labels
from mlcd.service.inference.served import ServedEncoder, ServedTextEncoder, ServedTower
from mlcd.service.settings import Settings
from mlcd.service.telemetry.request import current_request
from mlcd.service.telemetry.text_metrics import TowerMetrics
from mlcd.service.timings import TRITON_BACK_S, TRITON_LABELS_S, TRITON_LOAD_S
from mlcd.types import Embeddings

if TYPE_CHECKING:  # an extra
    from mlcd.encoders.labeled_ensemble import LabeledEnsemble
    from mlcd.encoders.triton import TritonEncoder, TritonTextEncoder

_log = logging.getLogger("mlcd.service")


class TritonEngine:
    """An `Engine` (see `mlcd.service.inference.contract`) for images or texts.

    Its encoder watches Triton's health. labels: ensemble of the same version, None if Triton has
    none.
    """

    failing = False
    overdue = False
    back_in_s = TRITON_BACK_S

    def __init__(
        self,
        encoder: "TritonEncoder | TritonTextEncoder",
        served: ServedTower,
        labels: "LabeledEnsemble | None" = None,
    ) -> None:
        self.encoder, self.served, self.labels = encoder, served, labels

    @property
    def up(self) -> bool:
        return self.encoder.up

    @property
    def labels_of(self) -> str | None:
        return None if self.labels is None else self.labels.centers

    @property
    def overdue_s(self) -> float:
        return self.encoder.patience_s

    @property
    def last_success(self) -> float:
        """The present time while Triton is up, because the encoder checks that inferences succeed.

        So readiness sends no trial inference, which might wait for other clients' requests.
        """
        return asyncio.get_running_loop().time() if self.up else float(self.encoder.last_success)

    def observe(self, metrics: TowerMetrics) -> None:
        metrics.engine_up(lambda: self.up)

    async def load_beside(self, version: int | None) -> int:
        """Makes Triton load another version of the model beside this one, and returns its number.

        version: None selects the newest. Raises the errors of
        `mlcd.encoders.triton_versions.load_version`.
        """
        from mlcd.encoders.triton_versions import load_version

        return await load_version(
            self.encoder.url, self.encoder.name, version, timeout_s=TRITON_LOAD_S
        )

    async def unload_others(self) -> None:
        """Makes Triton unload the model's other versions."""
        from mlcd.encoders.triton_versions import keep_version

        await keep_version(
            self.encoder.url, self.encoder.name, self.encoder.version, timeout_s=TRITON_LOAD_S
        )


class Direct:
    """A `mlcd.service.inference.contract.Dispatcher` that sends every item as one request."""

    def __init__(self, engine: TritonEngine, *, timeout_s: float, metrics: TowerMetrics) -> None:
        """timeout_s: time limit of an item, even if its deadline is later."""
        self._encoder, self._timeout_s, self._metrics = engine.encoder, timeout_s, metrics
        self._labels, self._labels_retry_at = engine.labels, -np.inf

    def expect_item(self) -> AbstractContextManager[None]:
        """Does nothing: Triton does not wait for expected items."""
        return nullcontext()

    async def label(self, embeddings: Embeddings, *, deadline: float) -> None:
        """Does nothing: Triton's ensemble labels images only."""

    async def encode(
        self, item: NDArray[Any], *, deadline: float = np.inf, request: object | None = None
    ) -> Row:
        """Encodes one item; inference_s includes the time in Triton's queue."""
        del request  # Triton serves items in the order of arrival
        timeout_s = min(self._timeout_s, deadline - asyncio.get_running_loop().time())
        record = current_request()
        trace = None if record is None else record.trace_headers.get("traceparent")
        started = time.perf_counter()
        row = await self._encode_with_labels(item, timeout_s, trace)
        if row is None:
            rows = await self._encoder.encode(item[None], timeout_s=timeout_s, traceparent=trace)
            row = rows[0]
        seconds = time.perf_counter() - started
        self._metrics.observe_inference(seconds)
        return Row(row, 0.0, seconds, started)

    async def _encode_with_labels(
        self, item: NDArray[Any], timeout_s: float, trace: str | None
    ) -> NDArray[np.float32] | None:
        """Embeds and labels an item in one call, if the request needs labels and Triton has them,
        and stores the labels for the request; otherwise returns None.
        """
        request_labels = self._find_request_labels(timeout_s)
        if request_labels is None or self._labels is None:
            return None
        try:
            labels = await self._labels.label(item[None], timeout_s=timeout_s, traceparent=trace)
        except (Overloaded, DeadlineExceeded):
            raise
        except Unavailable as error:
            # the model itself may still work, which the caller's next request will show
            self._labels_retry_at = asyncio.get_running_loop().time() + TRITON_LABELS_S
            _log.warning("Triton's labels failed, so this server finds them: %s", error)
            return None
        request_labels.add(labels.embeddings[0], labels.ids[0], labels.similarities[0])
        row: NDArray[np.float32] = labels.embeddings[0]
        return row

    def _find_request_labels(self, timeout_s: float) -> EngineLabels | None:
        request_labels = find_requested_labels()
        if request_labels is None or self._labels is None or timeout_s <= 0 or not self._encoder.up:
            return None
        may_try = asyncio.get_running_loop().time() >= self._labels_retry_at
        return (
            request_labels if may_try and request_labels.centers == self._labels.centers else None
        )


@asynccontextmanager
async def open_triton_engine(
    settings: Settings, *, version: int | None = None
) -> AsyncIterator[TritonEngine]:
    """Opens the model MLCD_MODEL of the server at MLCD_TRITON__URL, and checks that it embeds.

    version: replaces MLCD_TRITON__VERSION. Raises ConfigInvalid if the package is missing or the
    settings contradict the model's preprocessing, and the errors of
    `mlcd.encoders.triton.open_triton`.
    """
    try:
        from mlcd.encoders.labeled_ensemble import open_labels
        from mlcd.encoders.triton import open_triton
    except ModuleNotFoundError as error:
        raise ConfigInvalid(
            "engine triton needs the package tritonclient", remedy=install_command("triton")
        ) from error
    assert settings.triton.url is not None
    encoder = await open_triton(
        settings.triton.url, settings.model, version=version or settings.triton.version
    )
    labels = None
    try:
        for name in ("exif", "decode"):
            setting = getattr(settings, name)
            if setting not in (None, getattr(encoder.preprocess, name)):
                raise ConfigInvalid(
                    f"MLCD_{name.upper()}={setting}, but Triton's model prepares images otherwise",
                    remedy="export the model with that preprocessing",
                )
        # Triton batches, so only the duration of requests is known here.
        request_s = encoder.slowest_s
        served = ServedEncoder.of(
            encoder, max_batch=encoder.max_batch, shortest_s=request_s, longest_s=request_s
        )
        labels = await open_labels(encoder.url, encoder.name, encoder.version, encoder.fingerprint)
        yield TritonEngine(encoder, served, labels)
    finally:
        if labels is not None:
            await labels.close()
        await encoder.close()


@asynccontextmanager
async def open_triton_texts(
    settings: Settings, images: TritonEngine
) -> AsyncIterator[tuple[TritonEngine, Tokenizer]]:
    """Opens the text tower of the same version, with the tokenizer at MLCD_TRITON__TEXT.

    Raises ConfigInvalid if the text tower belongs to another model, and the errors of
    `mlcd.encoders.triton.open_triton_text`.
    """
    from mlcd.encoders.triton import open_triton_text

    assert settings.triton.text is not None
    encoder = await open_triton_text(
        images.encoder.url,
        settings.model,
        Path(settings.triton.text),
        version=images.encoder.version,
    )
    try:
        if encoder.fingerprint != images.encoder.fingerprint:
            raise ConfigInvalid(
                f"Triton's text tower must have the fingerprint of {settings.model}, got"
                f" {encoder.fingerprint}",
                remedy="export both towers together",
            )
        request_s = encoder.slowest_s
        served = ServedTextEncoder.of(
            encoder, max_batch=encoder.max_batch, shortest_s=request_s, longest_s=request_s
        )
        yield TritonEngine(encoder, served), encoder.tokenizer
    finally:
        await encoder.close()
