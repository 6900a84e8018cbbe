"""The pipeline from image bytes to embeddings: admission, decoding in a bounded pool, dispatch.

A bad image does not fail other images. Decoders are threads, because Pillow and simplejpeg release
the interpreter's lock while they work.
"""

import asyncio
import io
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mlcd.errors import DeadlineExceeded, ImageRejected, Rejection
from mlcd.images.decode import DecodeLimits, OpenedImage, format_of, num_pixels, open_image
from mlcd.images.transform import PreprocessSpec
from mlcd.service.errors import TooLarge
from mlcd.service.inference.admission import Admission
from mlcd.service.inference.contract import Dispatcher, Engine, refuse_when_down
from mlcd.service.inference.decoding_threads import DecodingThreads
from mlcd.service.inference.outcomes import (
    Account,
    Anybody,
    Encoded,
    EncodedItem,
    OnOutcome,
    Timings,
    join_outcomes,
    report_outcome,
    report_task,
)
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.telemetry.request import took

_LARGE_PIXELS: Final = 16_000_000  # photographs of most cameras are smaller
# Up to this size, headers are read on the event loop, in about 0.05 ms: waking a thread would take
# as long. The worst hostile headers take 6 ms.
_SMALL_BYTES: Final = 8 * 2**10
# A request of one image within these limits is also decoded on the event loop; the worst hostile
# image took 1.6 ms.
_SMALL_FORMATS: Final = ("JPEG", "PNG")
_SMALL_SIDE: Final = 128
_SMALL_ASPECT: Final = 2  # resizing the shorter side to the model's makes a long strip large

_Image: TypeAlias = bytes | OpenedImage | Rejection
# an image and its number of pixels
_Sized: TypeAlias = tuple[_Image, int]


class Pipeline:
    """Encodes image bytes to embeddings, for all routes."""

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
        """headers: threads that read headers, separate from `decoders`, because a refusal must not
        wait for other images. large: threads for images that take seconds, so that these do not
        occupy `decoders`. max_pixels: limit of pixels in one request.
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
        """Decodes an image, so that no client waits for libraries that the first image loads."""
        loop, image = asyncio.get_running_loop(), _blank_jpeg()
        await loop.run_in_executor(self._headers, _read_headers, [image], self._limits)
        await self._decoders.run(self, 0, partial(self._preprocess.prepare, image, self._limits))

    async def encode(
        self,
        images: Sequence[bytes | Rejection],
        /,
        *,
        deadline: float,
        on_outcome: OnOutcome | None = None,
        account: Account | None = None,
    ) -> Encoded:
        """Encodes every image independently; a rejection in `images` is copied to `errors`.

        deadline: by the running loop's clock. A cancelled call drops images that are not yet
        decoded or encoded. Raises Overloaded when the server is at a limit, TooLarge for too many
        pixels in one request, Unavailable while the engine is down or when it fails,
        DeadlineExceeded, and the errors of `account`.
        """
        account = account or Anybody()
        loop = asyncio.get_running_loop()
        if loop.time() > deadline:
            raise DeadlineExceeded(
                "the time for a request has passed", remedy="send fewer images at once"
            )
        refuse_when_down(self._engine, self._metrics)
        with self._admission.images.hold(len(images), deadline=deadline):
            read = partial(_read_headers, images, self._limits)
            small = sum(len(image) for image in images if isinstance(image, bytes)) <= _SMALL_BYTES
            if small and len(images) == 1:
                read = partial(_open_small, images[0], self._limits)
            opened, pixels = read() if small else await loop.run_in_executor(self._headers, read)
            num = sum(pixels)
            if num > self._max_pixels:
                raise TooLarge(
                    f"a request must have at most {self._max_pixels} pixels, got {num}",
                    limit="max_queued_pixels",
                )
            await account.charge(pixels)
            with self._admission.pixels.hold(num, owner=account.owner):
                outcomes = await self._encode_all(
                    list(zip(opened, pixels, strict=True)), deadline, on_outcome, account.owner
                )
        for outcome in outcomes:
            if isinstance(outcome, Rejection):
                self._metrics.count_rejected(outcome.reason)
        return join_outcomes(outcomes, dimension=self._dimension)

    async def _encode_all(
        self, images: Sequence[_Sized], deadline: float, on_outcome: OnOutcome | None, owner: object
    ) -> list[EncodedItem | Rejection]:
        # A request gives only a few images to the decoders at a time, so that requests alternate.
        decoding, request = asyncio.Semaphore(2 * self._num_decoders), object()
        if len(images) == 1:  # without a task, which would take a tenth of a small image's time
            outcome = await self._encode_one(images[0], decoding, deadline, request, owner)
            if on_outcome is not None:
                report_outcome(on_outcome, 0, outcome)
            return [outcome]
        tasks = [
            asyncio.ensure_future(self._encode_one(image, decoding, deadline, request, owner))
            for image in images
        ]
        if on_outcome is not None:
            for index, task in enumerate(tasks):
                task.add_done_callback(partial(report_task, on_outcome, index))
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _encode_one(
        self,
        sized: _Sized,
        decoding: asyncio.Semaphore,
        deadline: float,
        request: object,
        owner: object,
    ) -> EncodedItem | Rejection:
        image, num_pixels = sized
        if isinstance(image, Rejection):
            return image
        started = time.perf_counter()
        try:
            pixels = await self._decode(image, num_pixels, decoding, owner)
        except ImageRejected as rejection:
            return _strip_traceback(rejection)
        except asyncio.CancelledError:
            is_late = asyncio.get_running_loop().time() >= deadline
            self._metrics.count_dropped("deadline" if is_late else "client_gone")
            raise
        decoded = time.perf_counter()
        took("decode", started, decoded)
        row = await self._dispatcher.encode(pixels, deadline=deadline, request=request)
        row.record_stages()
        if not row.embedding.any():
            return ImageRejected(
                "no-embedding", "the model finds nothing in this image to describe"
            )
        return EncodedItem(row.embedding, Timings(decoded - started, row.queue_s, row.inference_s))

    async def _decode(
        self,
        image: bytes | OpenedImage,
        num_pixels: int,
        decoding: asyncio.Semaphore,
        owner: object,
    ) -> NDArray[np.uint8]:
        if isinstance(image, OpenedImage):
            return self._decode_on_loop(image)
        prepare = partial(self._preprocess.prepare, image, self._limits)
        decoders = self._large if num_pixels > _LARGE_PIXELS else self._decoders
        async with decoding:
            started = time.perf_counter()
            self._num_decoding += 1
            try:
                with self._dispatcher.expect_item():
                    return await decoders.run(owner, num_pixels, prepare)
            finally:
                self._num_decoding -= 1
                self._metrics.observe_decoding(format_of(image), time.perf_counter() - started)

    def _decode_on_loop(self, image: OpenedImage) -> NDArray[np.uint8]:
        started = time.perf_counter()
        try:
            return self._preprocess.prepare(image, self._limits)
        finally:
            self._metrics.observe_decoding(format_of(image.data), time.perf_counter() - started)


def _open_small(image: bytes | Rejection, limits: DecodeLimits) -> tuple[list[_Image], list[int]]:
    """Returns the result of `_read_headers` for one image, opened if the event loop decodes it."""
    if isinstance(image, Rejection):
        return [image], [0]
    try:
        opened = open_image(image, limits=limits)
    except ImageRejected as rejection:
        return [_strip_traceback(rejection)], [0]
    longest, shortest = max(opened.file.size), min(opened.file.size)
    if (
        opened.file.format in _SMALL_FORMATS
        and longest <= _SMALL_SIDE
        and longest <= _SMALL_ASPECT * shortest
    ):
        return [opened], [opened.num_pixels]
    with opened.file:
        return [image], [opened.num_pixels]


def _read_headers(
    images: Sequence[bytes | Rejection], limits: DecodeLimits
) -> tuple[list[_Image], list[int]]:
    """Returns the images and their numbers of pixels.

    An image that must be rejected because of its header is replaced by its rejection, with 0
    pixels.
    """
    checked: list[_Image] = []
    pixels: list[int] = []
    for image in images:
        try:
            pixels.append(0 if isinstance(image, Rejection) else num_pixels(image, limits=limits))
            checked.append(image)
        except ImageRejected as rejection:
            pixels.append(0)
            checked.append(_strip_traceback(rejection))
    return checked, pixels


def _strip_traceback(rejection: ImageRejected) -> ImageRejected:
    """Returns the rejection without its traceback, whose frames would keep the images and, in a
    reference cycle, the rejection itself in memory.
    """
    rejection.__cause__ = rejection.__context__ = None
    return rejection.with_traceback(None)


def _blank_jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG")
    return buffer.getvalue()
