"""The served engine as an encoder for work outside of requests, called from threads."""

import asyncio
import time
from concurrent.futures import TimeoutError as NotYet

import numpy as np

from mlcd.errors import Overloaded, Unavailable
from mlcd.service.inference.contract import Dispatcher
from mlcd.service.inference.served import ServedEncoder
from mlcd.service.timings import ENGINE_PATIENCE_S, ENGINE_PAUSE_S
from mlcd.types import Embeddings, ImageBatch


class DispatchedEncoder:
    """The `Encoder` protocol: every batch takes its turn among the images of requests."""

    def __init__(
        self, served: ServedEncoder, dispatcher: Dispatcher, loop: asyncio.AbstractEventLoop
    ) -> None:
        """loop: the one that the dispatcher is used from; it runs in another thread."""
        self.name, self.fingerprint = served.name, served.fingerprint
        self.dimension, self.preprocess = served.dimension, served.preprocess
        self.engine, self.precision = served.engine, served.precision
        self.job_batch = served.max_batch
        self._dispatcher, self._loop = dispatcher, loop

    def encode(self, images: ImageBatch) -> Embeddings:
        """Encodes uint8 [N, 3, S, S] to float32 [N, D]. Raises Unavailable where the engine stays
        away, or the server stops.
        """
        until = time.monotonic() + ENGINE_PATIENCE_S
        while True:
            try:
                return self._encode_once(images)
            except (Overloaded, Unavailable):
                if time.monotonic() > until or self._loop.is_closed():
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
        rows = asyncio.run_coroutine_threadsafe(encode_all(), self._loop)
        while True:
            try:
                return rows.result(ENGINE_PAUSE_S)
            except NotYet as error:
                if self._loop.is_closed():
                    raise Unavailable("the server is stopping") from error

    def close(self) -> None:
        """Does nothing: the engine is the server's."""
