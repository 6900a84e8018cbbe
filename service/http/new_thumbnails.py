"""Thumbnails of a request's images, rendered on separate decoding threads."""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from fastapi import Request

from mlcd.errors import ImageRejected
from mlcd.images.decode import DecodeLimits, num_pixels
from mlcd.images.thumbnail import Thumbnail, thumbnail
from mlcd.service.deadline import within_deadline
from mlcd.service.resources import Resources
from mlcd.service.telemetry.request import time_stage

_log = logging.getLogger("mlcd.service")


async def thumbnails_of(
    request: Request, resources: Resources, images: Mapping[int, bytes]
) -> dict[int, Thumbnail]:
    """Returns the thumbnails of encoded images by index, without images whose rendering fails."""
    limits = DecodeLimits(
        max_bytes=resources.settings.limits.max_body_bytes,
        max_pixels=resources.settings.limits.max_pixels,
    )
    side, key = resources.settings.thumbnails.side, request.state.key
    owner = object() if key is None else key.id

    async def render(image: bytes) -> Thumbnail | None:
        try:
            pixels = num_pixels(image, limits=limits)
            return await resources.rendering.run(
                owner, pixels, partial(thumbnail, image, side=side, limits=limits)
            )
        except ImageRejected as rejection:
            _log.warning("cannot render the thumbnail of an image: %s", rejection.reason)
            return None

    with time_stage("thumbnails"):
        pictures = await within_deadline(
            asyncio.gather(*(render(image) for image in images.values())), request.state.deadline
        )
    return {
        index: picture
        for index, picture in zip(images, pictures, strict=True)
        if picture is not None
    }
