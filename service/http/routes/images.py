"""The route that embeds uploaded images, as JSON, raw float32, npy or Arrow."""

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.service.http.access import AppResources, ModelName, use_model
from mlcd.service.http.answers import negotiate
from mlcd.service.http.auth import needs
from mlcd.service.http.bodies import read_images
from mlcd.service.http.embedding_answers import BINARY_CONTENT, OFFERED, embedding_answer
from mlcd.service.http.encoding import encode
from mlcd.service.http.openapi import image_body
from mlcd.wire.embedding import EmbeddedImages

router = APIRouter(tags=["embed"])

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": EmbeddedImages, "content": BINARY_CONTENT},
    404: {},
    406: {},
}


@router.post(
    "/v1/images/embed",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=image_body(),
)
async def embed_images(
    request: Request, resources: AppResources, model: ModelName = None
) -> Response:
    """Embeds the images of a multipart form (field `files`) or one raw image.

    JSON and Arrow report errors per image. For the raw and npy matrices, one invalid image refuses
    the whole request, and the error has its index.
    """
    resources = await use_model(model, request, resources)
    media_type = negotiate(request, OFFERED)
    with resources.dispatcher.expect_item():
        images = await read_images(request, resources.settings.limits)
    encoded = await encode(request, resources, images)
    return embedding_answer(media_type, encoded, resources, param="files")
