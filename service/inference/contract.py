"""The protocols of an engine and of its dispatcher, for routes, readiness and the pipeline."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import Unavailable
from mlcd.service.inference.served import ServedTower
from mlcd.service.telemetry.request import took
from mlcd.service.telemetry.text_metrics import TowerMetrics
from mlcd.types import Embeddings


class Engine(Protocol):
    """Computes embeddings, and reports its health."""

    @property
    def served(self) -> ServedTower:
        """The opened encoder."""
        ...

    @property
    def up(self) -> bool:
        """Tells whether the engine accepts items now."""
        ...

    @property
    def failing(self) -> bool:
        """Tells whether the latest inference failed."""
        ...

    @property
    def overdue(self) -> bool:
        """Tells whether an inference has been running for longer than `overdue_s`."""
        ...

    @property
    def overdue_s(self) -> float:
        """The seconds after which a running inference may be hanging."""
        ...

    @property
    def last_success(self) -> float:
        """The time of the last success, by the loop's clock."""
        ...

    @property
    def back_in_s(self) -> float:
        """The approximate seconds until an engine that is down is up again."""
        ...

    @property
    def labels_of(self) -> str | None:
        """The digest of the centers with which the engine labels its embeddings; None without."""
        ...

    def observe(self, metrics: TowerMetrics) -> None:
        """Reports the engine's health in `metrics`, which have the opened model as label."""
        ...


@dataclass(frozen=True)
class Row:
    """The embedding of one item with its times.

    embedding: [D]. queue_s: seconds of waiting for the engine. inference_s: seconds of its batch.
    started: start of its batch's inference, by time.perf_counter.
    """

    embedding: NDArray[np.float32]
    queue_s: float
    inference_s: float
    started: float

    def record_stages(self) -> None:
        """Adds the stages to the record of the current request."""
        took("queue", self.started - self.queue_s, self.started)
        took("inference", self.started, self.started + self.inference_s)


class Dispatcher(Protocol):
    """Sends prepared images or texts to an engine. Use from any task of one event loop."""

    def expect_item(self) -> AbstractContextManager[None]:
        """Expects an item within the context, in which it is prepared; it is sent soon after."""
        ...

    async def label(self, embeddings: Embeddings, *, deadline: float) -> None:
        """Adds labels of unit rows to those that the current request needs and lacks.

        deadline: by the loop's clock; fewer labels, or none, are added if the engine finds none
        until then.
        """
        ...

    async def encode(
        self, item: NDArray[Any], *, deadline: float = np.inf, request: object | None = None
    ) -> Row:
        """Encodes one item, an image uint8 [3, S, S] or a text int64 [T], to its unit embedding.

        deadline: by the loop's clock. request: identifies the request; requests take turns. Raises
        Overloaded if the queue is full, Unavailable if the engine fails, and DeadlineExceeded after
        the deadline.
        """
        ...


def refuse_when_down(engine: Engine, metrics: TowerMetrics) -> None:
    """Raises and counts Unavailable while the engine is down, before work for it starts."""
    if not engine.up:
        metrics.count_rejected("unavailable")
        raise down()


def down() -> Unavailable:
    return Unavailable("the engine is restarting", remedy="try again in a moment")
