"""What routes, readiness and the pipeline ask of an engine and of the way to it, whichever these are."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import Unavailable
from service.inference.served import ServedEncoder
from service.telemetry.metrics import Metrics
from service.telemetry.request import took


class Engine(Protocol):
    """What computes embeddings, and how it is."""

    served: ServedEncoder

    @property
    def up(self) -> bool:
        """Whether it can be given images now."""
        ...

    @property
    def failing(self) -> bool:
        """Whether the latest inference failed."""
        ...

    @property
    def overdue(self) -> bool:
        """Whether an inference has been running for longer than `overdue_s`."""
        ...

    @property
    def overdue_s(self) -> float:
        """An inference that runs longer is in doubt."""
        ...

    @property
    def last_success(self) -> float:
        """By the loop's clock."""
        ...

    @property
    def back_in_s(self) -> float:
        """While it is down: about when it will be up."""
        ...

    def observe(self, metrics: Metrics) -> None:
        """Tell `metrics`, which are labeled with what was opened, how it is."""
        ...


@dataclass(frozen=True)
class Row:
    """embedding: [D]; queue_s: wait for the engine; inference_s: of the batch it rode in."""

    embedding: NDArray[np.float32]
    queue_s: float
    inference_s: float
    started: float
    """Of that batch's inference, by time.perf_counter."""

    def tell(self) -> None:
        """The request that it belongs to."""
        took("queue", self.started - self.queue_s, self.started)
        took("inference", self.started, self.started + self.inference_s)


class Dispatcher(Protocol):
    """The way of one prepared image to an engine; from any task of one loop."""

    def announced(self) -> AbstractContextManager[None]:
        """An image is being prepared and will be here soon."""
        ...

    async def encode(
        self, pixels: NDArray[np.uint8], *, deadline: float = np.inf, request: object | None = None
    ) -> Row:
        """One prepared image, uint8 [3, S, S], to its unit embedding.

        deadline: by the loop's clock; request: images of the same one share its turns.
        Raises Overloaded when the queue is full, Unavailable when the engine fails, DeadlineExceeded when it is late.
        """
        ...


def refuse_when_down(engine: Engine, metrics: Metrics) -> None:
    """Raises Unavailable, counted, while there is no engine: before work that only it could finish."""
    if not engine.up:
        metrics.rejected("unavailable")
        raise down()


def down() -> Unavailable:
    return Unavailable("the engine is being started again", remedy="try again in a moment")
