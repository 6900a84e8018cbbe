"""The common base of the two clients: construction and argument checks."""

from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, TypeVar

from mlcd.extras import install_command

try:
    import httpx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"mlcd.client needs httpx: {install_command('client')}", name="httpx"
    ) from error

import numpy as np
from numpy.typing import ArrayLike

from mlcd.client.batch_jobs import AsyncJobs
from mlcd.client.batches import ImageBatcher
from mlcd.client.call import Call
from mlcd.client.connection import Connection
from mlcd.client.requests import RequestBounds, Server
from mlcd.client.results import Answer
from mlcd.client.text_batches import TIMES_BATCH, TextBatcher
from mlcd.errors import ConfigInvalid, InvalidInput
from mlcd.types import Embeddings, Fingerprint, as_array, unit_rows

_Batch = TypeVar("_Batch")
_Value = TypeVar("_Value")
# sends one batch and returns its answer
Ask = Callable[[_Batch], Coroutine[Any, Any, Answer[_Value]]]


@dataclass(eq=False, repr=False)
class BaseClient:
    """A client of one server.

    Sends nothing before the first call. Reads no keys, proxies or certificates from the
    environment. Raises ConfigInvalid for an unusable argument.
    """

    # the server's address, such as http://127.0.0.1:8000
    url: InitVar[str]
    _: KW_ONLY
    api_key: InitVar[str | None] = None
    # required model fingerprint; answers of other models raise Conflict
    fingerprint: Fingerprint | None = None
    # seconds for one request including its retries
    deadline_s: InitVar[float] = 60.0
    # retries of a request after 429, 502, 503 or a broken connection, never before Retry-After
    retries: InitVar[int] = 8
    # items per request; fewer if the server accepts fewer, or if images are large
    batch_size: int = 16
    # concurrent requests within one call
    in_flight: int = 4
    # httpx's transport, for a proxy or certificates of your own
    transport: InitVar[httpx.AsyncBaseTransport | None] = None
    _server: Server = field(init=False)
    _jobs: AsyncJobs = field(init=False)

    def __post_init__(
        self,
        url: str,
        api_key: str | None,
        deadline_s: float,
        retries: int,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        settings = {
            "deadline_s": deadline_s,
            "batch_size": self.batch_size,
            "in_flight": self.in_flight,
        }
        for name, value in settings.items():
            if not value > 0:
                raise ConfigInvalid(f"{name} must be more than 0, got {value}")
        if retries < 0:
            raise ConfigInvalid(f"retries must be at least 0, got {retries}")
        connection = Connection(
            url, api_key=api_key, deadline_s=deadline_s, retries=retries, transport=transport
        )
        self._server = Server(connection)
        self._jobs = AsyncJobs(connection)

    def _call(self, *, strict: bool) -> Call[Any]:
        return Call(strict=strict, fingerprint=self.fingerprint)

    def _num_items(self, bounds: RequestBounds) -> int:
        return min(self.batch_size, bounds.max_items)

    def _text_batcher(self, bounds: RequestBounds) -> TextBatcher:
        num = min(TIMES_BATCH * self.batch_size, bounds.max_texts)
        return TextBatcher(num=num, max_chars=bounds.max_text_chars)

    def _image_batcher(self, bounds: RequestBounds) -> ImageBatcher:
        return ImageBatcher(
            max_images=self._num_items(bounds), max_body_bytes=bounds.max_body_bytes
        )


def check_one_given(**arguments: object) -> None:
    """Raises InvalidInput unless exactly one of the arguments is not None."""
    if sum(value is not None for value in arguments.values()) != 1:
        raise InvalidInput(f"give exactly one of {', '.join(arguments)}")


def check_rows(embeddings: ArrayLike | None) -> Embeddings:
    """Returns [N, D] as float32, otherwise unchanged. Raises InvalidInput naming the first row
    that is not finite or zero.
    """
    rows = as_array(embeddings).astype(np.float32, copy=False)
    unit_rows(rows)
    return rows
