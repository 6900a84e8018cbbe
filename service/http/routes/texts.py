"""The route that embeds texts into the space of the model's images."""

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.wire.embedding import TextsRequest, TextVectors
from service.http.access import Opened
from service.http.answers import negotiate
from service.http.auth import needs
from service.http.embedding_answers import BINARY_CONTENT, OFFERED, embedding_answer
from service.http.json_route import JsonRoute
from service.http.text_encoding import encode_texts

router = APIRouter(tags=["embed"], route_class=JsonRoute)

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": TextVectors, "content": BINARY_CONTENT},
    406: {},
}


@router.post(
    "/v1/texts/embed",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
)
async def embed_texts(body: TextsRequest, request: Request, resources: Opened) -> Response:
    """Embeds texts. A model without a text tower answers 422, `no-text-tower`.

    JSON and Arrow answer per text. The two binary matrices are all or nothing: one bad text refuses
    the request, naming its index.
    """
    chosen = negotiate(request, OFFERED)
    encoded_texts = await encode_texts(request, resources, body.texts)
    return embedding_answer(
        chosen,
        encoded_texts.encoded,
        resources,
        param="texts[{index}]",
        tokens=encoded_texts.num_tokens,
    )
