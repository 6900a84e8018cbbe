"""The route that labels images or texts with their nearest centers."""

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any, Final

import numpy as np
from fastapi import APIRouter, Query, Request
from numpy.typing import NDArray
from starlette.responses import Response

from mlcd.artifacts.centers import Centers
from mlcd.clustering.members import NUM_EXAMPLES
from mlcd.errors import InvalidInput
from mlcd.service.deadline import within_deadline
from mlcd.service.errors import StrictBatch
from mlcd.service.http.access import AppResources, ModelName, use_model
from mlcd.service.http.answers import (
    JSON,
    NPY,
    RAW,
    check_answer_bytes,
    headers,
    list_answer,
    negotiate,
    provenance,
    to_npy,
)
from mlcd.service.http.auth import needs
from mlcd.service.http.center_pages import example_members
from mlcd.service.http.openapi import BINARY, image_body
from mlcd.service.http.problems import item_error
from mlcd.service.http.queries import check_top, read_queries
from mlcd.service.inference.engine_labels import EngineLabels
from mlcd.service.inference.lookup import Lookup, LookupMode
from mlcd.service.resources import Resources
from mlcd.service.telemetry.request import time_stage
from mlcd.types import Neighbors
from mlcd.wire.embedding import QueryRequest
from mlcd.wire.nearest_centers import LabeledImages

router = APIRouter(tags=["labels"])

_LABEL_BYTES: Final = 80  # least size of a label or an example in JSON
_OFFERED: Final = (JSON, RAW, NPY)
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": LabeledImages, "content": {RAW: BINARY, NPY: BINARY}},
    404: {},
    406: {},
    409: {},
}


@router.post(
    "/v1/labels",
    dependencies=[needs("embed")],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=image_body(QueryRequest),
)
async def label(
    request: Request,
    resources: AppResources,
    top: Annotated[int, Query(ge=1)] = 8,
    threshold: Annotated[float | None, Query(ge=-1, le=1)] = None,
    mode: LookupMode = "exact",
    examples: Annotated[int, Query(ge=0, le=NUM_EXAMPLES)] = 0,
    model: ModelName = None,
) -> Response:
    """Finds the `top` nearest centers of each image or text, best first.

    A label has the cluster that the center belongs to, and its path through the levels.
    `threshold` leaves out less similar centers. `examples` adds that many members of each center
    to JSON answers, if members are stored with the centers.

    JSON reports errors per item; for the binary formats, one invalid item refuses the whole
    request. Octet-stream: ids, little-endian int32 [n, l], then scores, float32 [n, l]; l is in
    X-Mlcd-Top. npy: n records of ids (l int32) and scores (l float32). If fewer than l centers
    reach the threshold, the row is padded with id -1 and score -inf.
    """
    resources = await use_model(model, request, resources)
    media_type = negotiate(request, _OFFERED)
    lookup = require_lookup(resources)
    if mode not in lookup.modes:
        raise InvalidInput(
            "this server does not offer approximate labels",
            remedy="use mode=exact, or start the server with MLCD_APPROXIMATE=true",
        )
    check_top(top, resources)
    engine_labels = EngineLabels(lookup.centers.digest, min(top, len(lookup.centers.vectors)))
    requested = engine_labels.request if mode == "exact" else nullcontext
    with requested():
        queries = await read_queries(request, resources)
    if media_type != JSON and queries.errors:
        raise StrictBatch.first_of(queries.errors, param=f"{queries.name}[{{index}}]")
    # half of the time is left for a scan in this process
    half_time = (asyncio.get_running_loop().time() + request.state.deadline) / 2
    with resources.metrics.looking_up(mode), time_stage("labels"):
        with requested():
            await resources.dispatcher.label(queries.embeddings, deadline=half_time)
        found = resources.lookups.nearest(
            lookup,
            queries.embeddings,
            top,
            threshold,
            mode=mode,
            are_images=queries.are_images,
            engine_labels=engine_labels,
        )
        neighbors, novel = await within_deadline(found, request.state.deadline)
    if mode == "exact":
        num_scanned = len(neighbors.ids) - engine_labels.num_used
        resources.metrics.labels_found(engine=engine_labels.num_used, server=num_scanned)
    if novel is not None:
        resources.metrics.count_labeled(images=len(neighbors.ids), novel=novel)
    answer_headers = {
        **headers(resources, queries.encoded),
        "X-Mlcd-Mode": mode,
        "X-Mlcd-Top": str(neighbors.ids.shape[1]),
    }
    if media_type == RAW:
        return Response(
            neighbors.ids.astype("<i4").tobytes() + neighbors.scores.astype("<f4").tobytes(),
            200,
            answer_headers,
            RAW,
        )
    if media_type == NPY:
        return Response(to_npy(_to_records(neighbors)), 200, answer_headers, NPY)
    num_items = neighbors.ids.size * (1 + examples)
    check_answer_bytes(
        _LABEL_BYTES * num_items,
        resources.settings.limits,
        remedy="give a smaller `top`, or fewer `examples`",
    )
    return list_answer(
        {
            **provenance(resources),
            "centers": lookup.centers.digest,
            "mode": mode,
            **_audit_fields(lookup, mode),
            "errors": [item_error(index, error) for index, error in queries.errors.items()],
        },
        [
            partial(_build_result, index, ids, scores, lookup.centers, examples)
            for index, ids, scores in zip(
                queries.rows, neighbors.ids, neighbors.scores, strict=True
            )
        ],
        answer_headers,
        resources,
        num_items=num_items,
    )


def require_lookup(resources: Resources) -> Lookup:
    return resources.model.data.require_lookup()


def _audit_fields(lookup: Lookup, mode: LookupMode) -> dict[str, Any]:
    """Returns the audit of approximate labels, which only their answers have."""
    if mode == "exact" or lookup.approximation is None:
        return {}
    return {"audit": lookup.approximation.audit}


def _to_records(neighbors: Neighbors) -> np.ndarray[Any, np.dtype[np.void]]:
    num, length = neighbors.ids.shape
    records = np.zeros(num, np.dtype([("ids", "<i4", (length,)), ("scores", "<f4", (length,))]))
    records["ids"], records["scores"] = neighbors.ids, neighbors.scores
    return records


def _build_result(
    index: int,
    ids: NDArray[np.int64],
    scores: NDArray[np.float32],
    centers: Centers,
    num_examples: int,
) -> dict[str, Any]:
    labels = [
        _build_label(int(center), float(score), centers, num_examples)
        for center, score in zip(ids, scores, strict=True)
        if center >= 0
    ]
    return {"index": index, "labels": labels}


def _build_label(
    center: int, similarity: float, centers: Centers, num_examples: int
) -> dict[str, Any]:
    label = {
        "id": center,
        "similarity": similarity,
        "name": centers.name(center),
        "cluster": centers.cluster(center),
        "path": centers.path(center),
    }
    return (
        {**label, "examples": example_members(centers, center, num_examples)}
        if num_examples
        else label
    )
