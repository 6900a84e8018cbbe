"""The route that embeds uploaded images, as JSON, raw float32, npy or Arrow."""

from typing import Any, Final

import pyarrow as pa
from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.wire import EmbeddedImages
from service.errors import StrictBatch
from service.http.access import Opened
from service.http.answers import (
    ARROW,
    JSON,
    NPY,
    RAW,
    headers,
    json_answer,
    negotiated,
    provenance,
    to_npy,
)
from service.http.auth import needs
from service.http.bodies import read_images
from service.http.encoding import encode
from service.http.openapi import BINARY, image_body
from service.http.problems import item_error
from service.inference.pipeline import Encoded
from service.resources import Resources

router = APIRouter(tags=["images"])

_OFFERED: Final = (JSON, RAW, NPY, ARROW)
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": EmbeddedImages, "content": {RAW: BINARY, NPY: BINARY, ARROW: BINARY}},
    406: {},
}


@router.post(
    "/v1/images/embed",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=image_body(),
)
async def embed_images(request: Request, resources: Opened) -> Response:
    """Embeds the images of a multipart form (field `files`) or one raw image.

    JSON and Arrow answer per image. The two binary matrices have no partial answer: one bad image
    refuses the request, naming its index.
    """
    chosen = negotiated(request, _OFFERED)
    with resources.dispatcher.announced():
        images = await read_images(request, resources.settings.limits)
    encoded = await encode(request, resources, images)
    stamp = headers(resources, encoded)
    if chosen == JSON:
        return json_answer(_as_json(encoded, resources), stamp)
    if chosen == ARROW:
        return Response(_as_arrow(encoded, len(images)), 200, stamp, ARROW)
    if encoded.errors:
        raise StrictBatch.first_of(encoded.errors, param="files")
    content = (
        encoded.embeddings.astype("<f4").tobytes() if chosen == RAW else to_npy(encoded.embeddings)
    )
    return Response(content, 200, stamp, chosen)


def _as_json(encoded: Encoded, resources: Resources) -> dict[str, Any]:
    return {
        **provenance(resources),
        "dimension": resources.encoder.dimension,
        "results": [
            {"index": index, "embedding": row}
            for index, row in zip(encoded.rows, encoded.embeddings, strict=True)
        ],
        "errors": [item_error(index, error) for index, error in encoded.errors.items()],
    }


def _as_arrow(encoded: Encoded, num_images: int) -> bytes:
    """Returns the columns index, embedding (null if it failed), error (null if it did not)."""
    row_of = {index: row for row, index in enumerate(encoded.rows)}
    embeddings = [encoded.embeddings[row_of[i]] if i in row_of else None for i in range(num_images)]
    errors = [encoded.errors[i].reason if i in encoded.errors else None for i in range(num_images)]
    table = pa.table(
        {
            "index": pa.array(range(num_images), pa.int32()),
            "embedding": pa.array(embeddings, pa.list_(pa.float32(), encoded.embeddings.shape[1])),
            "error": pa.array(errors, pa.string()),
        }
    )
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table)
    return bytes(buffer.getvalue())
