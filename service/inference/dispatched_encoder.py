"""Makes the served engine an encoder for work outside of requests, called from threads."""

import asyncio
import time
from concurrent.futures import TimeoutError as ResultTimeout

import numpy as np

from mlcd.errors import Overloaded, Unavailable
from mlcd.service.inference.contract import Dispatcher
from mlcd.service.inference.served import ServedEncoder
from mlcd.service.timings import ENGINE_PATIENCE_S, ENGINE_PAUSE_S
from mlcd.types import Embeddings, ImageBatch


class DispatchedEncoder:
    """The `Encoder` protocol over a dispatcher: its images take turns with those of requests."""

    def __init__(
        self, served: ServedEncoder, dispatcher: Dispatcher, loop: asyncio.AbstractEventLoop
    ) -> None:
        """loop: event loop of the dispatcher; it runs in another thread."""
        self.name, self.fingerprint = served.name, served.fingerprint
        self.dimension, self.preprocess = served.dimension, served.preprocess
        self.engine, self.precision = served.engine, served.precision
        self.job_batch = served.max_batch
        self._dispatcher, self._loop = dispatcher, loop

    def encode(self, images: ImageBatch) -> Embeddings:
        """Encodes uint8 [N, 3, S, S] to float32 [N, D]. Raises Unavailable if the engine stays down
        for ENGINE_PATIENCE_S, or when the server stops.
        """
        give_up_at = time.monotonic() + ENGINE_PATIENCE_S
        while True:
            try:
                return self._encode_once(images)
            except (Overloaded, Unavailable):
                if time.monotonic() > give_up_at or self._loop.is_closed():
                    raise
                time.sleep(ENGINE_PAUSE_S)

    def _encode_once(self, images: ImageBatch) -> Embeddings:
        async def encode_all() -> Embeddings:
            rows = await asyncio.gather(
                *(self._dispatcher.encode(image, request=self) for image in images)
            )
            return np.stack([row.embedding for row in rows])

        if self._loop.is_closed():
            raise Unavailable("the server is stopping")
        future = asyncio.run_coroutine_threadsafe(encode_all(), self._loop)
        while True:
            try:
                return future.result(ENGINE_PAUSE_S)
            except ResultTimeout as error:
                if self._loop.is_closed():
                    raise Unavailable("the server is stopping") from error

    def close(self) -> None:
        """Does nothing, because the server owns the engine."""
