"""The protocols of an engine and of the way to it, which routes, readiness and the pipeline use."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import Unavailable
from mlcd.service.inference.served import ServedTower
from mlcd.service.telemetry.request import took
from mlcd.service.telemetry.text_metrics import TowerMetrics


class Engine(Protocol):
    """A part that computes embeddings, and its health."""

    @property
    def served(self) -> ServedTower:
        """The opened encoder."""
        ...

    @property
    def up(self) -> bool:
        """Tells whether the engine takes items now."""
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
        """The seconds after which a running inference is in doubt."""
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
        """The digest of the centers by which it labels what it embeds; None where it does not."""
        ...

    def observe(self, metrics: TowerMetrics) -> None:
        """Connects the engine's health to `metrics`, which are labeled with the opened model."""
        ...


@dataclass(frozen=True)
class Row:
    """The embedding of one item with its times.

    embedding: [D]. queue_s: the wait for the engine. inference_s: that of its batch. started: the
    start of that batch's inference, by time.perf_counter.
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
    """The way of one prepared image or text to an engine. Use from any task of one loop."""

    def announce(self) -> AbstractContextManager[None]:
        """Announces, within the context, that an item is being prepared and will come soon."""
        ...

    async def encode(
        self, item: NDArray[Any], *, deadline: float = np.inf, request: object | None = None
    ) -> Row:
        """Encodes one item, an image uint8 [3, S, S] or a text int64 [T], to its unit embedding.

        deadline: by the loop's clock. request: items of the same request share its turns.
        Raises Overloaded when the queue is full, Unavailable when the engine fails, and
        DeadlineExceeded when the item is late.
        """
        ...


def refuse_when_down(engine: Engine, metrics: TowerMetrics) -> None:
    """Raises and counts Unavailable while the engine is down, before work that needs it begins."""
    if not engine.up:
        metrics.count_rejected("unavailable")
        raise down()


def down() -> Unavailable:
    return Unavailable("the engine is being started again", remedy="try again in a moment")
