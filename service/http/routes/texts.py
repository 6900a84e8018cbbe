"""The route that embeds texts into the space of the model's images."""

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.service.http.access import AppResources, ModelName, use_model
from mlcd.service.http.answers import negotiate
from mlcd.service.http.auth import needs
from mlcd.service.http.embedding_answers import BINARY_CONTENT, OFFERED, embedding_answer
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.text_encoding import encode_texts
from mlcd.wire.embedding import TextsRequest, TextVectors

router = APIRouter(tags=["embed"], route_class=JsonRoute)

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": TextVectors, "content": BINARY_CONTENT},
    404: {},
    406: {},
}


@router.post(
    "/v1/texts/embed",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
)
async def embed_texts(
    body: TextsRequest, request: Request, resources: AppResources, model: ModelName = None
) -> Response:
    """Embeds texts. A model without a text tower answers 422, `no-text-tower`.

    JSON and Arrow report errors per text. For the raw and npy matrices, one invalid text refuses
    the whole request, and the error has its index.
    """
    resources = await use_model(model, request, resources)
    media_type = negotiate(request, OFFERED)
    encoded_texts = await encode_texts(request, resources, body.texts)
    return embedding_answer(
        media_type,
        encoded_texts.encoded,
        resources,
        param="texts[{index}]",
        tokens=encoded_texts.num_tokens,
    )
