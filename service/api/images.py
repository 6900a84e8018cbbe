"""Embeddings of uploaded images, as JSON, raw float32, npy or Arrow."""

import io
from typing import Any, Final

import numpy as np
import pyarrow as pa
from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.types import Embeddings
from service.api.access import Opened
from service.api.answers import json_answer, provenance
from service.api.bodies import openapi_body, read_images
from service.dispatch.pipeline import Encoded
from service.middleware import within_deadline
from service.problems import NotAcceptable, StrictBatch, item_error
from service.resources import Resources

router = APIRouter(tags=["images"])

_JSON: Final = "application/json"
_RAW: Final = "application/octet-stream"
_NPY: Final = "application/x-npy"
_ARROW: Final = "application/vnd.apache.arrow.stream"
_OFFERED: Final = (_JSON, _RAW, _NPY, _ARROW)


@router.post("/v1/images/embed", response_class=Response, openapi_extra=openapi_body())
async def embed_images(request: Request, resources: Opened) -> Response:
    """Embed the images of a multipart form (field `files`) or one raw image.

    JSON and Arrow answer per image. The two binary matrices know no partial answer: with them one bad image
    refuses the request, naming its index.
    """
    chosen = _negotiated(request.headers.get("accept", "*/*"))
    limits = resources.settings.limits
    with resources.batcher.announced():
        images = await read_images(request, limits)
    encoded: Encoded = await within_deadline(resources.pipeline.encode(images), limits.deadline_s)
    if chosen == _JSON:
        return json_answer(_as_json(encoded, resources))
    if chosen == _ARROW:
        return Response(_as_arrow(encoded, len(images)), media_type=_ARROW, headers=_headers(resources))
    if encoded.errors:
        raise StrictBatch(*next(iter(encoded.errors.items())))
    content = encoded.embeddings.astype("<f4").tobytes() if chosen == _RAW else _as_npy(encoded.embeddings)
    return Response(content, media_type=chosen, headers=_headers(resources))


def _negotiated(accept: str) -> str:
    for offer in (part.split(";")[0].strip().lower() for part in accept.split(",")):
        if offer in _OFFERED:
            return offer
        if offer in ("*/*", "application/*", ""):
            return _JSON
    raise NotAcceptable("this route cannot answer in that media type", remedy=f"accept one of {', '.join(_OFFERED)}")


def _headers(resources: Resources) -> dict[str, str]:
    return {
        "X-Mlcd-Model": resources.encoder.name,
        "X-Mlcd-Fingerprint": resources.encoder.fingerprint,
        "X-Mlcd-Dimension": str(resources.encoder.dimension),
    }


def _as_json(encoded: Encoded, resources: Resources) -> dict[str, Any]:
    return {
        **provenance(resources),
        "dimension": resources.encoder.dimension,
        "results": [
            {"index": index, "embedding": row} for index, row in zip(encoded.rows, encoded.embeddings, strict=True)
        ],
        "errors": [item_error(index, error) for index, error in encoded.errors.items()],
    }


def _as_npy(rows: Embeddings) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return buffer.getvalue()


def _as_arrow(encoded: Encoded, num_images: int) -> bytes:
    """Columns index, embedding (null where it failed), error (null where it did not)."""
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
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table)
    return buffer.getvalue()
