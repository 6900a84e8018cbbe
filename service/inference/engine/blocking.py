"""The encoder of a process that serves nobody, as the `Encoder` protocol: its calls block.

It computes in this process; or it is Triton's asynchronous encoder, in an event loop of its own.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, cast

from mlcd.encoders import open_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.errors import Overloaded
from mlcd.service.inference.engine.fake import FakeEncoder
from mlcd.service.inference.engine.triton import open_triton_engine
from mlcd.service.settings import Settings
from mlcd.service.timings import TRITON_BUSY_PAUSE_S
from mlcd.types import Embeddings, ImageBatch

if TYPE_CHECKING:  # an extra
    from mlcd.encoders.triton import TritonEncoder

IN_FLIGHT: Final = 3  # batches: one that runs, one that waits there, one on its way
# The share of MLCD_JOBS__STALL_S for which a batch gives way to the requests that fill Triton's
# queue. That is no hang.
_BUSY_SHARE: Final = 0.5


@contextmanager
def open_blocking_encoder(
    settings: Settings, folder: str, *, num_threads: int
) -> Iterator[Encoder]:
    """Opens the model at `folder`; with Triton, the one that the settings name.

    Raises what opening the model raises.
    """
    if settings.engine == "triton":
        with _open_triton_batches(settings) as batches:
            yield batches
    elif settings.engine == "fake":
        yield FakeEncoder(folder)
    else:
        with closing(open_encoder(folder, settings.encoder_options(num_threads))) as encoder:
            yield encoder


@contextmanager
def _open_triton_batches(settings: Settings) -> Iterator["TritonBatches"]:
    """Opens Triton's encoder in an event loop of its own. Raises as `open_triton_engine`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="triton", daemon=True)
    thread.start()

    engine = open_triton_engine(settings)
    try:
        opened = asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        try:
            busy_s = _BUSY_SHARE * settings.jobs.stall_s
            encoder = cast("TritonEncoder", opened.encoder)  # that of images
            yield TritonBatches(encoder, loop, timeout_s=settings.triton.timeout_s, busy_s=busy_s)
        finally:
            asyncio.run_coroutine_threadsafe(engine.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class TritonBatches:
    """The `Encoder` protocol over a model in Triton. Several threads may each have a batch."""

    engine = "triton"

    def __init__(
        self,
        encoder: "TritonEncoder",
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float,
        busy_s: float,
    ) -> None:
        self.name, self.fingerprint, self.dimension = (
            encoder.name,
            encoder.fingerprint,
            encoder.dimension,
        )
        self.preprocess, self.precision = encoder.preprocess, encoder.precision
        self._encoder, self._loop, self._timeout_s = encoder, loop, timeout_s
        self._busy_s = busy_s

    def encode(self, images: ImageBatch) -> Embeddings:
        """Encodes as `TritonEncoder.encode`; waits for its turn where Triton's queue is full."""
        until_s = time.monotonic() + self._busy_s
        while True:
            request = self._encoder.encode(images, timeout_s=self._timeout_s)
            try:
                return asyncio.run_coroutine_threadsafe(request, self._loop).result()
            except Overloaded:
                if time.monotonic() > until_s:
                    raise
                time.sleep(TRITON_BUSY_PAUSE_S)

    def close(self) -> None:
        """Whoever opened the connection closes it."""
