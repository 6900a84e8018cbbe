"""The nearest class centers of images: multi-label look-up."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from mlcd.clustering.centers import Centers
from mlcd.clustering.nearest import CenterScan
from mlcd.errors import NotFound
from mlcd.types import Neighbors
from service.api.access import Opened
from service.api.answers import json_answer, provenance
from service.api.bodies import openapi_body
from service.api.queries import JSON_SCHEMA, Queries, read_queries
from service.problems import TooLarge, item_error
from service.resources import Resources

router = APIRouter(tags=["labels"])


@router.post("/v1/labels", response_class=Response, openapi_extra=openapi_body(JSON_SCHEMA))
async def label(
    request: Request,
    resources: Opened,
    top: Annotated[int, Query(ge=1)] = 8,
    threshold: Annotated[float | None, Query(ge=-1, le=1)] = None,
    mode: Literal["exact"] = "exact",
) -> Response:
    """The `top` nearest centers of each image, exact, best first; with `threshold` only those so similar."""
    del mode  # there is one, and others are refused
    centers, scan = opened_centers(resources)
    if top > resources.settings.limits.max_top:
        raise TooLarge(f"top={top} is more than {resources.settings.limits.max_top}", limit="max_top")
    queries = await read_queries(request, resources)
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(resources.compute, _look_up, queries, centers, scan, top, threshold)
    return json_answer(
        {
            **provenance(resources),
            "centers": centers.digest,
            "results": _results(queries, found, centers),
            "errors": [item_error(index, error) for index, error in queries.errors.items()],
        }
    )


def opened_centers(resources: Resources) -> tuple[Centers, CenterScan]:
    if resources.centers is None or resources.scan is None:
        raise NotFound("this model was started without centers", remedy="start the server with --centers")
    return resources.centers, resources.scan


def _look_up(queries: Queries, centers: Centers, scan: CenterScan, top: int, threshold: float | None) -> Neighbors:
    return scan.nearest(centers.align(queries.embeddings), min(top, len(centers.vectors)), threshold)


def _results(queries: Queries, found: Neighbors, centers: Centers) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "labels": [
                {"id": int(center), "similarity": float(score), "name": centers.name(int(center))}
                for center, score in zip(ids, scores, strict=True)
                if center >= 0
            ],
        }
        for index, ids, scores in zip(queries.rows, found.ids, found.scores, strict=True)
    ]
