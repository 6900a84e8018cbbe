"""The pipeline from image bytes to embeddings: admission, decoding in a bounded pool, dispatch.

A bad image fails alone. Decoders are threads: Pillow and simplejpeg release the interpreter's lock
while they work.
"""

import asyncio
import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mlcd.errors import DeadlineExceeded, ImageRejected
from mlcd.images.decode import DecodeLimits, format_of, num_pixels
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings
from service.errors import TooLarge
from service.inference.admission import Admission
from service.inference.contract import Dispatcher, Engine, refuse_when_down
from service.inference.decoding_threads import DecodingThreads
from service.telemetry.metrics import Metrics
from service.telemetry.request import took

_LARGE_PIXELS: Final = 16_000_000  # photographs of most cameras are smaller


@dataclass(frozen=True)
class Timings:
    """The seconds that the slowest image of a request spent in each stage."""

    decode_s: float = 0.0  # with the wait for a free decoder
    queue_s: float = 0.0
    inference_s: float = 0.0  # of the image's batch
    cache_s: float = 0.0  # look-ups of the whole request, and waits for encodings of other requests
    fetch_s: float | None = None  # of all images at URLs together; None where there are none

    def server_timing(self) -> str:
        """Returns the value of a Server-Timing header, in milliseconds."""
        stages = {
            **({} if self.fetch_s is None else {"fetch": self.fetch_s}),
            "cache": self.cache_s,
            "decode": self.decode_s,
            "queue": self.queue_s,
            "inference": self.inference_s,
        }
        return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in stages.items())


@dataclass(frozen=True)
class Encoded:
    """The embeddings of a request.

    embeddings: [M, D] of the images that succeeded. rows: their M indexes in the request. errors:
    those of the other images. rounded: the type that the cache rounds vectors to, None where they
    are exact.
    """

    embeddings: Embeddings
    rows: list[int]
    errors: dict[int, ImageRejected]
    timings: Timings = Timings()
    rounded: str | None = None


@dataclass(frozen=True)
class _One:
    embedding: NDArray[np.float32]
    timings: Timings


# An image and the number of its pixels.
_Sized: TypeAlias = tuple[bytes | ImageRejected, int]
# A callback for every image as soon as it is done: its index in the request, its embedding [D] or
# its rejection.
Each: TypeAlias = Callable[[int, NDArray[np.float32] | ImageRejected], None]


class Account(Protocol):
    """The client of a request: its images are charged to it and decoded in turn with others'."""

    @property
    def owner(self) -> object: ...

    async def charge(self, pixels: Sequence[int]) -> None:
        """Charges images with these numbers of pixels.

        Raises RateExceeded or InvalidInput where they are too much.
        """
        ...


class Anybody:
    """The account of a request without a client, whose images cost nothing."""

    @property
    def owner(self) -> object:
        return self

    async def charge(self, pixels: Sequence[int]) -> None: ...


class Pipeline:
    """The way from image bytes to embeddings, shared by all routes."""

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        admission: Admission,
        *,
        headers: Executor,
        decoders: Executor,
        large: Executor,
        num_decoders: int,
        preprocess: PreprocessSpec,
        dimension: int,
        limits: DecodeLimits,
        max_pixels: int,
        metrics: Metrics,
    ) -> None:
        """Takes the thread pools and limits.

        headers: threads that read headers; they are not `decoders`, because a refusal must not wait
        for other images. large: threads for images that take seconds, which leaves `decoders` to
        the others. max_pixels: the limit of one request.
        """
        self._engine, self._dispatcher, self._admission = engine, dispatcher, admission
        self._headers, self._num_decoders = headers, num_decoders
        self._decoders, self._large = DecodingThreads(decoders), DecodingThreads(large)
        self._preprocess, self._dimension = preprocess, dimension
        self._limits, self._max_pixels = limits, max_pixels
        self._metrics = metrics
        self._num_decoding = 0
        metrics.queue_depth("decode", lambda: max(0, self._num_decoding - self._num_decoders))

    async def warm_up(self) -> None:
        """Reads and decodes an image, so that no client waits for what the first one loads."""
        loop, image = asyncio.get_running_loop(), _blank_jpeg()
        await loop.run_in_executor(self._headers, _read_headers, [image], self._limits)
        await self._decoders.run(self, 0, partial(self._preprocess.prepare, image, self._limits))

    async def encode(
        self,
        images: Sequence[bytes | ImageRejected],
        *,
        deadline: float,
        each: Each | None = None,
        account: Account | None = None,
    ) -> Encoded:
        """Encodes every image on its own; an ImageRejected in `images` is passed on to `errors`.

        deadline: by the running loop's clock. A cancelled call drops images that are not decoded or
        not encoded yet. Raises Overloaded when the server is at a limit, TooLarge for too many
        pixels in one request, Unavailable while the engine is down or when it fails,
        DeadlineExceeded, and what `account` raises.
        """
        account = account or Anybody()
        loop = asyncio.get_running_loop()
        if loop.time() > deadline:
            raise DeadlineExceeded(
                "the time for a request has passed", remedy="send fewer images at once"
            )
        refuse_when_down(self._engine, self._metrics)
        with self._admission.images(len(images), deadline=deadline):
            images, pixels = await loop.run_in_executor(
                self._headers, _read_headers, images, self._limits
            )
            num = sum(pixels)
            if num > self._max_pixels:
                raise TooLarge(
                    f"{num} pixels in one request, more than {self._max_pixels}",
                    limit="max_queued_pixels",
                )
            await account.charge(pixels)
            with self._admission.pixels.reserved(num, owner=account.owner):
                outcomes = await self._encode_all(
                    list(zip(images, pixels, strict=True)), deadline, each, account.owner
                )
        return self._joined(outcomes)

    async def _encode_all(
        self, images: Sequence[_Sized], deadline: float, each: Each | None, owner: object
    ) -> list[_One | ImageRejected]:
        # A request gives only a few images to the decoders at a time, so others come in between.
        turn, request = asyncio.Semaphore(2 * self._num_decoders), object()
        tasks = [
            asyncio.ensure_future(self._encode_one(image, turn, deadline, request, owner))
            for image in images
        ]
        if each is not None:
            for index, task in enumerate(tasks):
                task.add_done_callback(partial(_report, each, index))
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _encode_one(
        self,
        sized: _Sized,
        turn: asyncio.Semaphore,
        deadline: float,
        request: object,
        owner: object,
    ) -> _One | ImageRejected:
        image, num_pixels = sized
        if isinstance(image, ImageRejected):
            return image
        started = time.perf_counter()
        try:
            pixels = await self._decode(image, num_pixels, turn, owner)
        except ImageRejected as rejection:
            return _bare(rejection)
        except asyncio.CancelledError:
            late = asyncio.get_running_loop().time() >= deadline
            self._metrics.dropped("deadline" if late else "client_gone")
            raise
        decoded = time.perf_counter()
        took("decode", started, decoded)
        row = await self._dispatcher.encode(pixels, deadline=deadline, request=request)
        row.record_stages()
        if not row.embedding.any():
            return ImageRejected(
                "no-embedding", "the model finds nothing in this image to describe"
            )
        return _One(row.embedding, Timings(decoded - started, row.queue_s, row.inference_s))

    async def _decode(
        self, image: bytes, num_pixels: int, turn: asyncio.Semaphore, owner: object
    ) -> NDArray[np.uint8]:
        prepare = partial(self._preprocess.prepare, image, self._limits)
        decoders = self._large if num_pixels > _LARGE_PIXELS else self._decoders
        async with turn:
            started = time.perf_counter()
            self._num_decoding += 1
            try:
                with self._dispatcher.announced():
                    return await decoders.run(owner, num_pixels, prepare)
            finally:
                self._num_decoding -= 1
                self._metrics.decoded(format_of(image), time.perf_counter() - started)

    def _joined(self, outcomes: list[_One | ImageRejected]) -> Encoded:
        errors = {
            index: outcome
            for index, outcome in enumerate(outcomes)
            if isinstance(outcome, ImageRejected)
        }
        for error in errors.values():
            self._metrics.rejected(error.reason)
        found = [outcome for outcome in outcomes if isinstance(outcome, _One)]
        rows = [index for index in range(len(outcomes)) if index not in errors]
        embeddings = (
            np.stack([one.embedding for one in found])
            if found
            else np.zeros((0, self._dimension), np.float32)
        )
        return Encoded(
            np.ascontiguousarray(embeddings), rows, errors, slowest([one.timings for one in found])
        )


def _report(each: Each, index: int, task: "asyncio.Task[_One | ImageRejected]") -> None:
    if task.cancelled() or task.exception() is not None:
        return
    outcome = task.result()
    each(index, outcome.embedding if isinstance(outcome, _One) else outcome)


def _read_headers(
    images: Sequence[bytes | ImageRejected], limits: DecodeLimits
) -> tuple[list[bytes | ImageRejected], list[int]]:
    """Returns the images and the number of pixels of each.

    An image whose header shows that it must be rejected is replaced by its rejection, of 0 pixels.
    """
    checked: list[bytes | ImageRejected] = []
    pixels: list[int] = []
    for image in images:
        try:
            pixels.append(
                0 if isinstance(image, ImageRejected) else num_pixels(image, limits=limits)
            )
            checked.append(image)
        except ImageRejected as rejection:
            pixels.append(0)
            checked.append(_bare(rejection))
    return checked, pixels


def _bare(rejection: ImageRejected) -> ImageRejected:
    """Returns the rejection without its traceback.

    Its frames would keep the images in memory and, in a circle, the rejection itself.
    """
    rejection.__cause__ = rejection.__context__ = None
    return rejection.with_traceback(None)


def _blank_jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG")
    return buffer.getvalue()


def slowest(timings: list[Timings]) -> Timings:
    return Timings(
        max((one.decode_s for one in timings), default=0.0),
        max((one.queue_s for one in timings), default=0.0),
        max((one.inference_s for one in timings), default=0.0),
        max((one.cache_s for one in timings), default=0.0),
    )
