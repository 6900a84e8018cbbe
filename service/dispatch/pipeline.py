"""Image bytes to embeddings: admission, decoding in a bounded pool, the batcher. A bad image fails alone."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcd.errors import ImageRejected, Overloaded
from mlcd.images.decode import DecodeLimits
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings
from service.dispatch.batcher import MicroBatcher
from service.observability.metrics import Metrics


@dataclass(frozen=True)
class Encoded:
    """embeddings: [M, D] of the images that succeeded; rows: their M indexes in the request; errors: the others."""

    embeddings: Embeddings
    rows: list[int]
    errors: dict[int, ImageRejected]


class Pipeline:
    """Shared by all routes."""

    def __init__(
        self,
        batcher: MicroBatcher,
        decoders: ThreadPoolExecutor,
        *,
        preprocess: PreprocessSpec,
        dimension: int,
        limits: DecodeLimits,
        max_admitted: int,
        metrics: Metrics,
    ) -> None:
        self._batcher, self._decoders = batcher, decoders
        self._preprocess, self._dimension, self._limits = preprocess, dimension, limits
        self._max_admitted, self._admitted = max_admitted, 0
        self._metrics = metrics

    async def encode(self, images: Sequence[bytes | ImageRejected]) -> Encoded:
        """Every image on its own; an ImageRejected in `images` is passed through to `errors`.

        Raises Overloaded when the server holds too many images already, Unavailable when the engine fails.
        """
        if self._admitted + len(images) > self._max_admitted:
            self._metrics.rejected("overloaded")
            raise Overloaded(
                f"the server holds its limit of {self._max_admitted} images", remedy="try again in a moment"
            )
        self._admitted += len(images)
        try:
            tasks = [asyncio.ensure_future(self._encode_one(image)) for image in images]
            try:
                outcomes = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        finally:
            self._admitted -= len(images)
        errors = {index: outcome for index, outcome in enumerate(outcomes) if isinstance(outcome, ImageRejected)}
        for error in errors.values():
            self._metrics.rejected(error.reason)
        rows = [index for index in range(len(outcomes)) if index not in errors]
        found = [outcome for outcome in outcomes if not isinstance(outcome, ImageRejected)]
        embeddings = np.stack(found) if found else np.zeros((0, self._dimension), np.float32)
        return Encoded(np.ascontiguousarray(embeddings), rows, errors)

    async def _encode_one(self, image: bytes | ImageRejected) -> NDArray[np.float32] | ImageRejected:
        if isinstance(image, ImageRejected):
            return image
        try:
            loop = asyncio.get_running_loop()
            with self._batcher.announced(), self._metrics.decoding():
                pixels = await loop.run_in_executor(self._decoders, self._preprocess.prepare, image, self._limits)
        except ImageRejected as rejection:
            return rejection
        row = await self._batcher.encode(pixels)
        if not row.any():
            return ImageRejected("no-embedding", "the model finds nothing in this image to describe")
        return row
