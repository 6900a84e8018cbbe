"""The result of encoding a request's images or texts, and the account that pays for it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import Rejection
from mlcd.types import Embeddings


@dataclass(frozen=True)
class Timings:
    """The seconds that the slowest item of a request spent in each stage."""

    decode_s: float = 0.0  # includes the wait for a free decoder
    queue_s: float = 0.0
    inference_s: float = 0.0  # of the item's batch
    cache_s: float = 0.0  # look-ups of the whole request, and waits for encodings of other requests
    fetch_s: float | None = None  # of all images at URLs; None without any
    tokenize_s: float | None = None  # of all texts; None without any

    def server_timing(self) -> str:
        """Returns the value of a Server-Timing header, in milliseconds."""
        stages = {
            **({} if self.fetch_s is None else {"fetch": self.fetch_s}),
            **({} if self.tokenize_s is None else {"tokenize": self.tokenize_s}),
            "cache": self.cache_s,
            "decode": self.decode_s,
            "queue": self.queue_s,
            "inference": self.inference_s,
        }
        return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in stages.items())


@dataclass(frozen=True)
class Encoded:
    """The embeddings of a request.

    embeddings: [M, D], of the items that succeeded. rows: their M indices in the request. errors:
    rejections of the other items, by index. rounded: type to which the cache rounds vectors; None
    if they are exact.
    """

    embeddings: Embeddings
    rows: list[int]
    errors: dict[int, Rejection]
    timings: Timings = Timings()
    rounded: str | None = None


@dataclass(frozen=True)
class EncodedItem:
    """The embedding [D] of one item, and its times."""

    embedding: NDArray[np.float32]
    timings: Timings


# called for every item as soon as it is done, with its index in the request and its embedding [D]
# or rejection
OnOutcome: TypeAlias = Callable[[int, NDArray[np.float32] | Rejection], None]


class Account(Protocol):
    """The client of a request: its items are charged to it, and clients take turns in decoding."""

    @property
    def owner(self) -> object: ...

    async def charge(self, pixels: Sequence[int]) -> None:
        """Charges items that must be computed: images by their pixels, texts as 1 each.

        Raises RateExceeded or InvalidInput if they exceed the client's limits.
        """
        ...


class Anybody:
    """The account of a request without a client, whose items cost nothing."""

    @property
    def owner(self) -> object:
        return self

    async def charge(self, pixels: Sequence[int]) -> None: ...


class Encoding(Protocol):
    """Encodes the bytes of items to embeddings."""

    async def encode(
        self,
        items: Sequence[bytes | Rejection],
        /,
        *,
        deadline: float,
        account: Account | None = None,
    ) -> Encoded:
        """Encodes every item independently; a rejection in `items` is copied to `errors`."""
        ...


class Pipelined(Protocol):
    """An `Encoding` that reports each item as soon as it is done."""

    async def encode(
        self,
        items: Sequence[bytes | Rejection],
        /,
        *,
        deadline: float,
        on_outcome: OnOutcome | None = None,
        account: Account | None = None,
    ) -> Encoded: ...


def join_outcomes(outcomes: Sequence[EncodedItem | Rejection], *, dimension: int) -> Encoded:
    """Returns the result of a request from the outcomes of its items."""
    errors = {
        index: outcome for index, outcome in enumerate(outcomes) if isinstance(outcome, Rejection)
    }
    items = [outcome for outcome in outcomes if isinstance(outcome, EncodedItem)]
    rows = [index for index in range(len(outcomes)) if index not in errors]
    embeddings = (
        np.stack([item.embedding for item in items])
        if items
        else np.zeros((0, dimension), np.float32)
    )
    return Encoded(
        np.ascontiguousarray(embeddings), rows, errors, slowest([item.timings for item in items])
    )


def report_task(
    on_outcome: OnOutcome, index: int, task: "asyncio.Task[EncodedItem | Rejection]"
) -> None:
    """Calls `on_outcome` with the outcome of a task, unless it was cancelled or failed."""
    if not task.cancelled() and task.exception() is None:
        report_outcome(on_outcome, index, task.result())


def report_outcome(on_outcome: OnOutcome, index: int, outcome: EncodedItem | Rejection) -> None:
    """Calls `on_outcome` with the outcome of an item."""
    on_outcome(index, outcome.embedding if isinstance(outcome, EncodedItem) else outcome)


def slowest(timings: Sequence[Timings]) -> Timings:
    return Timings(
        max((item_timings.decode_s for item_timings in timings), default=0.0),
        max((item_timings.queue_s for item_timings in timings), default=0.0),
        max((item_timings.inference_s for item_timings in timings), default=0.0),
        max((item_timings.cache_s for item_timings in timings), default=0.0),
    )
