"""Triton for a worker: its asynchronous encoder, in an event loop of its own, as the `Encoder` protocol."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from mlcd.errors import Overloaded
from mlcd.types import Embeddings, ImageBatch
from service.inference.engine.triton import open_triton_engine
from service.settings import Settings

if TYPE_CHECKING:  # an extra
    from mlcd.encoders.triton import TritonEncoder

IN_FLIGHT: Final = 3
"""Batches: one that runs, one that waits there, one on its way."""
_BUSY_PAUSE_S: Final = 0.2
_BUSY_SHARE: Final = 0.5
"""Of MLCD_JOBS__STALL_S: for so long a batch gives way to the requests that fill Triton's queue. That is no hang."""


@contextmanager
def opened_triton(settings: Settings) -> Iterator["TritonBatches"]:
    """Raises as `open_triton_engine`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="triton", daemon=True)
    thread.start()

    engine = open_triton_engine(settings)
    try:
        opened = asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        try:
            busy_s = _BUSY_SHARE * settings.jobs.stall_s
            yield TritonBatches(opened.encoder, loop, timeout_s=settings.triton.timeout_s, busy_s=busy_s)
        finally:
            asyncio.run_coroutine_threadsafe(engine.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class TritonBatches:
    """The `Encoder` protocol over a model in Triton. Several threads may each have a batch there."""

    engine = "triton"

    def __init__(
        self, encoder: "TritonEncoder", loop: asyncio.AbstractEventLoop, *, timeout_s: float, busy_s: float
    ) -> None:
        self.name, self.fingerprint, self.dimension = encoder.name, encoder.fingerprint, encoder.dimension
        self.preprocess, self.precision = encoder.preprocess, encoder.precision
        self._encoder, self._loop, self._timeout_s = encoder, loop, timeout_s
        self._busy_s = busy_s

    def encode(self, images: ImageBatch) -> Embeddings:
        """As `TritonEncoder.encode`; where Triton's queue is full, this waits for its turn."""
        until_s = time.monotonic() + self._busy_s
        while True:
            request = self._encoder.encode(images, timeout_s=self._timeout_s)
            try:
                return asyncio.run_coroutine_threadsafe(request, self._loop).result()
            except Overloaded:
                if time.monotonic() > until_s:
                    raise
                time.sleep(_BUSY_PAUSE_S)

    def close(self) -> None:
        """Whoever opened the connection closes it."""
