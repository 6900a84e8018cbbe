"""The pipeline from image bytes to embeddings: admission, decoding in a bounded pool, dispatch.

A bad image fails alone. Decoders are threads: Pillow and simplejpeg release the interpreter's lock
while they work.
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
    report,
    tell,
)
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.telemetry.request import took

_LARGE_PIXELS: Final = 16_000_000  # photographs of most cameras are smaller
# Headers of so few bytes are read on the event loop, in about 0.05 ms: a thread would take as long
# to wake. The most hostile ones take 6 ms.
_SMALL_BYTES: Final = 8 * 2**10
# A lone image of such a kind, so few bytes and so small is decoded there, too: of hostile ones the
# worst took 1.6 ms.
_SMALL_FORMATS: Final = ("JPEG", "PNG")
_SMALL_SIDE: Final = 128
_SMALL_ASPECT: Final = 2  # the shorter side becomes the model's: a strip would be resized to much

_Image: TypeAlias = bytes | OpenedImage | Rejection
# An image and the number of its pixels.
_Sized: TypeAlias = tuple[_Image, int]


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
        images: Sequence[bytes | Rejection],
        /,
        *,
        deadline: float,
        on_outcome: OnOutcome | None = None,
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
        # A request gives only a few images to the decoders at a time, so others come in between.
        turn, request = asyncio.Semaphore(2 * self._num_decoders), object()
        if len(images) == 1:  # a task of its own would cost a tenth of a small image
            outcome = await self._encode_one(images[0], turn, deadline, request, owner)
            if on_outcome is not None:
                tell(on_outcome, 0, outcome)
            return [outcome]
        tasks = [
            asyncio.ensure_future(self._encode_one(image, turn, deadline, request, owner))
            for image in images
        ]
        if on_outcome is not None:
            for index, task in enumerate(tasks):
                task.add_done_callback(partial(report, on_outcome, index))
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
    ) -> EncodedItem | Rejection:
        image, num_pixels = sized
        if isinstance(image, Rejection):
            return image
        started = time.perf_counter()
        try:
            pixels = await self._decode(image, num_pixels, turn, owner)
        except ImageRejected as rejection:
            return _bare(rejection)
        except asyncio.CancelledError:
            late = asyncio.get_running_loop().time() >= deadline
            self._metrics.count_dropped("deadline" if late else "client_gone")
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
        turn: asyncio.Semaphore,
        owner: object,
    ) -> NDArray[np.uint8]:
        if isinstance(image, OpenedImage):
            return self._decode_here(image)
        prepare = partial(self._preprocess.prepare, image, self._limits)
        decoders = self._large if num_pixels > _LARGE_PIXELS else self._decoders
        async with turn:
            started = time.perf_counter()
            self._num_decoding += 1
            try:
                with self._dispatcher.announce():
                    return await decoders.run(owner, num_pixels, prepare)
            finally:
                self._num_decoding -= 1
                self._metrics.observe_decoding(format_of(image), time.perf_counter() - started)

    def _decode_here(self, image: OpenedImage) -> NDArray[np.uint8]:
        started = time.perf_counter()
        try:
            return self._preprocess.prepare(image, self._limits)
        finally:
            self._metrics.observe_decoding(format_of(image.data), time.perf_counter() - started)


def _open_small(image: bytes | Rejection, limits: DecodeLimits) -> tuple[list[_Image], list[int]]:
    """Returns what `_read_headers` does for a lone image, opened if it is to be decoded here."""
    if isinstance(image, Rejection):
        return [image], [0]
    try:
        opened = open_image(image, limits=limits)
    except ImageRejected as rejection:
        return [_bare(rejection)], [0]
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
    """Returns the images and the number of pixels of each.

    An image whose header shows that it must be rejected is replaced by its rejection, of 0 pixels.
    """
    checked: list[_Image] = []
    pixels: list[int] = []
    for image in images:
        try:
            pixels.append(0 if isinstance(image, Rejection) else num_pixels(image, limits=limits))
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
