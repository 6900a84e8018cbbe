"""Opens, from the settings, what a worker uses for all tasks: the engine and the centers.

The engine is in this process; or it is Triton's asynchronous encoder, in an event loop of its own,
as the `Encoder` protocol.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import open_artifact
from mlcd.encoders import open_encoder
from mlcd.encoders.base import Encoder
from mlcd.errors import Overloaded
from mlcd.pipelines.resolve import resolve_model
from mlcd.pipelines.shard import CenterSet, Equipment
from mlcd.types import Embeddings, ImageBatch
from service.host.threads import ThreadBudget, limit_blas
from service.inference.engine.fake import FakeEncoder
from service.inference.engine.triton import open_triton_engine
from service.inference.space import check_centers, find_centers
from service.settings import Settings
from service.timings import TRITON_BUSY_PAUSE_S

if TYPE_CHECKING:  # an extra
    from mlcd.encoders.triton import TritonEncoder

IN_FLIGHT: Final = 3  # batches: one that runs, one that waits there, one on its way
# The share of MLCD_JOBS__STALL_S for which a batch gives way to the requests that fill Triton's
# queue. That is no hang.
_BUSY_SHARE: Final = 0.5


@contextmanager
def open_equipment(settings: Settings, announce: Callable[[str], None]) -> Iterator[Equipment]:
    """Opens the engine and the centers. announce: called when weights are exported first, which
    takes a while.

    Raises what opening the model raises, and ConfigInvalid for centers of another model.
    """
    threads = ThreadBudget.of(settings)
    limit_blas(threads.blas)
    if settings.engine == "triton":
        with opened_triton(settings) as encoder:
            centers = _open_centers(settings, settings.model, encoder)
            yield Equipment(encoder, centers, num_threads=threads.decode, in_flight=IN_FLIGHT)
        return
    folder = (
        settings.model if settings.engine == "fake" else resolve_model(settings.model, announce)
    )
    with closing(_open_encoder(settings, folder, threads)) as encoder:
        yield Equipment(
            encoder, _open_centers(settings, folder, encoder), num_threads=threads.decode
        )


def _open_encoder(settings: Settings, folder: str, threads: ThreadBudget) -> Encoder:
    if settings.engine == "fake":
        return FakeEncoder(folder)
    return open_encoder(folder, settings.encoder_options(threads.engine))


def _open_centers(settings: Settings, folder: str, encoder: Encoder) -> CenterSet | None:
    path = find_centers(settings, folder)
    if path is None:
        return None
    artifact = open_artifact(path, "centers")
    centers = Centers.read(artifact)
    check_centers(path, centers, encoder.fingerprint)
    return CenterSet(artifact, centers)


@contextmanager
def opened_triton(settings: Settings) -> Iterator["TritonBatches"]:
    """Opens Triton's encoder in an event loop of its own. Raises as `open_triton_engine`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="triton", daemon=True)
    thread.start()

    engine = open_triton_engine(settings)
    try:
        opened = asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        try:
            busy_s = _BUSY_SHARE * settings.jobs.stall_s
            yield TritonBatches(
                opened.encoder, loop, timeout_s=settings.triton.timeout_s, busy_s=busy_s
            )
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
