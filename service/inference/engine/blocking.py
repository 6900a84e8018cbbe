"""Opens an encoder with blocking calls (the `Encoder` protocol), for processes without a server.

It computes in this process, or is Triton's asynchronous encoder in a separate event loop.
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

IN_FLIGHT: Final = 3  # batches: one is running, one is waiting in Triton, one is being sent
# The fraction of MLCD_JOBS__STALL_S for which a batch waits while requests fill Triton's queue,
# before it counts as failed.
_BUSY_SHARE: Final = 0.5


@contextmanager
def open_blocking_encoder(
    settings: Settings, folder: str, *, num_threads: int
) -> Iterator[Encoder]:
    """Opens the model at `folder`; with Triton, the model of the settings.

    Raises the errors of opening the model.
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
    """Opens Triton's encoder in a new event loop. Raises the errors of `open_triton_engine`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="triton", daemon=True)
    thread.start()

    engine = open_triton_engine(settings)
    try:
        triton = asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        try:
            busy_s = _BUSY_SHARE * settings.jobs.stall_s
            encoder = cast("TritonEncoder", triton.encoder)  # the image encoder
            yield TritonBatches(encoder, loop, timeout_s=settings.triton.timeout_s, busy_s=busy_s)
        finally:
            asyncio.run_coroutine_threadsafe(engine.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class TritonBatches:
    """The `Encoder` protocol over a model in Triton. Several threads may call it concurrently."""

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
        """Encodes like `TritonEncoder.encode`; retries while Triton's queue is full, for busy_s."""
        give_up_at = time.monotonic() + self._busy_s
        while True:
            request = self._encoder.encode(images, timeout_s=self._timeout_s)
            try:
                return asyncio.run_coroutine_threadsafe(request, self._loop).result()
            except Overloaded:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(TRITON_BUSY_PAUSE_S)

    def close(self) -> None:
        """Does nothing: `open_blocking_encoder` closes the connection."""
