"""Images of a request to embeddings, by its deadline."""

import asyncio
from collections.abc import Sequence

import numpy as np
from fastapi import Request

from mlcd.errors import ImageRejected
from mlcd.types import Embeddings, ImageBatch, unit_rows
from service.dispatch.engine import down
from service.dispatch.pipeline import Encoded, Timings
from service.middleware import within_deadline
from service.problems import BadRequest, StrictBatch
from service.resources import Resources


async def encode(request: Request, resources: Resources, images: Sequence[bytes | ImageRejected]) -> Encoded:
    """Every image on its own."""
    deadline: float = request.state.deadline
    return await within_deadline(resources.pipeline.encode(images, deadline=deadline), deadline)


async def encode_strictly(
    request: Request, resources: Resources, images: Sequence[bytes | ImageRejected], *, param: str = "input[{index}]"
) -> Encoded:
    """All of them, or StrictBatch of the first that failed, before any work where that is known.

    param: the field's name in the client's own words.
    """
    if known := {index: image for index, image in enumerate(images) if isinstance(image, ImageRejected)}:
        raise StrictBatch.first_of(known, param=param)
    encoded = await encode(request, resources, images)
    if encoded.errors:
        raise StrictBatch.first_of(encoded.errors, param=param)
    return encoded


async def encode_pixels(request: Request, resources: Resources, pixels: ImageBatch, *, param: str) -> Encoded:
    """Images that the client has prepared, uint8 [n, 3, S, S]: as `encode_strictly`, without decoding."""
    deadline: float = request.state.deadline
    if not resources.engine.up:
        raise down()
    with (
        resources.admission.images(len(pixels), deadline=deadline),
        resources.admission.pixels(pixels[:, 0].size),
    ):
        together = (resources.batcher.encode(image, deadline=deadline, request=request) for image in pixels)
        rows = await within_deadline(asyncio.gather(*together), deadline)
    timings = Timings(0.0, max(row.queue_s for row in rows), max(row.inference_s for row in rows))
    encoded = Encoded(np.stack([row.embedding for row in rows]), list(range(len(rows))), {}, timings)
    nothing = ImageRejected("no-embedding", "the model finds nothing in this image to describe")
    if zero := {int(row): nothing for row in np.flatnonzero(~encoded.embeddings.any(axis=1))}:
        raise StrictBatch.first_of(zero, param=param)
    return encoded


def shortened(rows: Embeddings, num: int | None, *, param: str) -> Embeddings:
    """The first `num` components, of unit length again: [N, D] to [N, num].

    Raises BadRequest naming `param` where rows have fewer, StrictBatch where nothing of a row is left.
    """
    if num is None:
        return rows
    if num > rows.shape[1]:
        raise BadRequest(f"{param} is at most {rows.shape[1]}", param=param)
    head = rows[:, :num]
    nothing = ImageRejected("no-embedding", f"its first {num} components are all zero")
    if zero := {int(row): nothing for row in np.flatnonzero(~head.any(axis=1))}:
        raise StrictBatch.first_of(zero, param=param)
    return unit_rows(head)
