"""Encodes a request's images to embeddings within the request's deadline."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from fastapi import Request

from mlcd.errors import ImageRejected
from mlcd.fetching.urls import Url
from mlcd.service.deadline import within_deadline
from mlcd.service.errors import BadRequest, StrictBatch
from mlcd.service.fetch.image_url import RequestImage
from mlcd.service.inference.contract import refuse_when_down
from mlcd.service.inference.outcomes import Encoded, Timings
from mlcd.service.keys.rates import RequestAccount
from mlcd.service.resources import Resources
from mlcd.service.telemetry.request import count_images, count_used, stage_s
from mlcd.types import Embeddings, ImageBatch, unit_rows

# A function that processes the fetched images of a request and their embeddings.
AfterEncoding: TypeAlias = Callable[[Sequence[bytes | ImageRejected], Encoded], Awaitable[None]]


async def encode(
    request: Request,
    resources: Resources,
    images: Sequence[RequestImage],
    *,
    num_beside: int = 0,
    after: AfterEncoding | None = None,
) -> Encoded:
    """Encodes images, fetching those at URLs; an image that fails does not affect the others.

    The images count against the rate limit of the client's key.
    num_beside: number of other items of the request to count with them. after: awaited while the
    images are still in memory.
    """
    count_images(len(images))
    account = await _open_account(request, resources, len(images) + num_beside)
    async with _fetch_urls(request, resources, resources.fetcher.screen(images)) as fetched_images:
        encoded = await _encode(request, resources, fetched_images, account)
        if after is not None:
            await after(fetched_images, encoded)
    return encoded


async def encode_strictly(
    request: Request,
    resources: Resources,
    images: Sequence[RequestImage],
    *,
    param: str = "input[{index}]",
) -> Encoded:
    """Encodes all images or raises StrictBatch for the first that failed.

    An image that is rejected without decoding is refused before any work.
    param: name of the field in the client's dialect.
    """
    count_images(len(images))
    sources = resources.fetcher.screen(images)
    _refuse_rejected(resources, sources, param)
    account = await _open_account(request, resources, len(images))
    async with _fetch_urls(request, resources, sources) as fetched_images:
        _refuse_rejected(resources, fetched_images, param)
        encoded = await _encode(request, resources, fetched_images, account)
    if encoded.errors:
        raise StrictBatch.first_of(encoded.errors, param=param)
    return encoded


async def encode_pixels(
    request: Request, resources: Resources, pixels: ImageBatch, *, param: str
) -> Encoded:
    """Encodes images that the client has already preprocessed, uint8 [n, 3, S, S].

    Raises StrictBatch like `encode_strictly`.
    """
    count_images(len(pixels))
    await resources.rate_limiter.take(request.state.key, len(pixels))
    deadline: float = request.state.deadline
    refuse_when_down(resources.engine, resources.metrics)
    with (
        resources.admission.images.hold(len(pixels), deadline=deadline),
        resources.admission.pixels.hold(
            pixels[:, 0].size, owner=request.state.key and request.state.key.id
        ),
    ):
        tasks = [
            asyncio.ensure_future(
                resources.dispatcher.encode(image, deadline=deadline, request=request)
            )
            for image in pixels
        ]
        try:
            rows = await within_deadline(asyncio.gather(*tasks), deadline)
        finally:  # after a failure, the other tasks would still occupy the queue
            for task in tasks:
                task.cancel()
    for row in rows:
        row.record_stages()
    timings = Timings(0.0, max(row.queue_s for row in rows), max(row.inference_s for row in rows))
    encoded = Encoded(
        np.stack([row.embedding for row in rows]), list(range(len(rows))), {}, timings
    )
    no_embedding = ImageRejected(
        "no-embedding", "the model finds nothing in this image to describe"
    )
    rejected = {int(row): no_embedding for row in np.flatnonzero(~encoded.embeddings.any(axis=1))}
    _count_outcomes(resources, embedded=len(rows) - len(rejected), rejected=len(rejected))
    if rejected:
        raise StrictBatch.first_of(rejected, param=param)
    return encoded


@asynccontextmanager
async def _fetch_urls(
    request: Request, resources: Resources, images: Sequence[bytes | ImageRejected | Url]
) -> AsyncIterator[list[bytes | ImageRejected]]:
    """Yields the images after fetching those at URLs.

    Refuses to fetch while the engine is down or no image would be admitted. The request's images
    are admitted only after all of them are fetched.
    """
    if not any(isinstance(image, Url) for image in images):
        yield [image for image in images if not isinstance(image, Url)]
        return
    refuse_when_down(resources.engine, resources.metrics)
    if resources.admission.images.full:
        raise resources.admission.images.refusal()
    async with resources.fetcher.fetch(images, deadline=request.state.deadline) as fetched_images:
        yield fetched_images


async def _open_account(request: Request, resources: Resources, num: int) -> RequestAccount:
    """Counts `num` images for the key; returns the account that charges large images more."""
    key, limits = request.state.key, resources.settings.limits
    await resources.rate_limiter.take(key, num)
    return RequestAccount(
        resources.rate_limiter, key, num_counted=num, pixels_per_image=limits.rate_pixels
    )


async def _encode(
    request: Request,
    resources: Resources,
    images: Sequence[bytes | ImageRejected],
    account: RequestAccount,
) -> Encoded:
    deadline: float = request.state.deadline
    work = resources.pipeline.encode(images, deadline=deadline, account=account)
    encoded = await within_deadline(work, deadline)
    _count_outcomes(resources, embedded=len(encoded.rows), rejected=len(encoded.errors))
    if (fetch_s := stage_s("fetch")) is None:
        return encoded
    return replace(encoded, timings=replace(encoded.timings, fetch_s=fetch_s))


def _refuse_rejected(
    resources: Resources, images: Sequence[bytes | ImageRejected | Url], param: str
) -> None:
    if rejected := {
        index: image for index, image in enumerate(images) if isinstance(image, ImageRejected)
    }:
        _count_outcomes(resources, embedded=0, rejected=len(rejected))
        raise StrictBatch.first_of(rejected, param=param)


def _count_outcomes(resources: Resources, *, embedded: int, rejected: int) -> None:
    resources.metrics.images(embedded=embedded, rejected=rejected)
    count_used(images=embedded)


def shorten(rows: Embeddings, num: int | None, *, param: str) -> Embeddings:
    """Returns the first `num` components, normalized to unit length: [N, D] to [N, num].

    Raises BadRequest, with `param`, if rows have fewer components, and StrictBatch if the first
    `num` components of a row are all zero.
    """
    if num is None:
        return rows
    if num > rows.shape[1]:
        raise BadRequest(f"{param} must be at most {rows.shape[1]}, got {num}", param=param)
    head = rows[:, :num]
    no_embedding = ImageRejected("no-embedding", f"its first {num} components are all zero")
    if rejected := {int(row): no_embedding for row in np.flatnonzero(~head.any(axis=1))}:
        raise StrictBatch.first_of(rejected, param=param)
    return unit_rows(head)
