"""Answers with the embeddings of a request: JSON, raw float32, npy or Arrow."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pyarrow as pa
from starlette.responses import Response

from mlcd.service.errors import StrictBatch
from mlcd.service.http.answers import (
    ARROW,
    JSON,
    NPY,
    RAW,
    headers,
    list_answer,
    provenance,
    to_npy,
)
from mlcd.service.http.openapi import BINARY
from mlcd.service.http.problems import item_error
from mlcd.service.inference.outcomes import Encoded
from mlcd.service.resources import Resources

OFFERED: Final = (JSON, RAW, NPY, ARROW)
BINARY_CONTENT: Final = {RAW: BINARY, NPY: BINARY, ARROW: BINARY}
NUMBER_BYTES: Final = 13  # a float32 in JSON, with its comma


def embedding_answer(
    media_type: str, encoded: Encoded, resources: Resources, *, param: str, **fields: Any
) -> Response:
    """Answers in `media_type`.

    JSON and Arrow report errors per item. The raw and npy matrices require that all items have
    embeddings: they raise StrictBatch, with `param`, for the first item without one.
    fields: additional fields of a JSON answer.
    """
    answer_headers = headers(resources, encoded)
    if media_type == JSON:
        return _answer_json(encoded, resources, answer_headers, fields)
    if media_type == ARROW:
        return Response(_write_arrow(encoded), 200, answer_headers, ARROW)
    if encoded.errors:
        raise StrictBatch.first_of(encoded.errors, param=param)
    content = (
        encoded.embeddings.astype("<f4").tobytes()
        if media_type == RAW
        else to_npy(encoded.embeddings)
    )
    return Response(content, 200, answer_headers, media_type)


def _answer_json(
    encoded: Encoded, resources: Resources, answer_headers: dict[str, str], fields: dict[str, Any]
) -> Response:
    content = {
        **provenance(resources),
        "dimension": resources.encoder.dimension,
        **fields,
        "errors": [item_error(index, error) for index, error in encoded.errors.items()],
    }
    results: list[Callable[[], Any]] = [
        partial(dict, index=index, embedding=row)
        for index, row in zip(encoded.rows, encoded.embeddings, strict=True)
    ]
    return list_answer(
        content,
        results,
        answer_headers,
        resources,
        num_items=len(results),
        num_bytes=NUMBER_BYTES * encoded.embeddings.size,
    )


def _write_arrow(encoded: Encoded) -> bytes:
    """Returns the columns index, embedding (null on failure) and error (null on success)."""
    num = len(encoded.rows) + len(encoded.errors)
    row_of = {index: row for row, index in enumerate(encoded.rows)}
    embeddings = [encoded.embeddings[row_of[i]] if i in row_of else None for i in range(num)]
    errors = [encoded.errors[i].reason if i in encoded.errors else None for i in range(num)]
    table = pa.table(
        {
            "index": pa.array(range(num), pa.int32()),
            "embedding": pa.array(embeddings, pa.list_(pa.float32(), encoded.embeddings.shape[1])),
            "error": pa.array(errors, pa.string()),
        }
    )
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table)
    return bytes(buffer.getvalue())
