"""The route that describes one center."""

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from mlcd.errors import NotFound
from service.deadline import within_deadline
from service.http.access import Opened
from service.http.answers import headers, json_answer, provenance
from service.http.auth import needs
from service.http.dialects.own.wire import DescribedCenter
from service.http.routes.labels import example_members, opened_lookup
from service.resources import Resources

router = APIRouter(tags=["labels"])

_NUM_NEIGHBORS: Final = 8
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": DescribedCenter},
    404: {},
    409: {},
    504: {},
}


@router.get(
    "/v1/centers/{center}",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_ANSWERS,
)
async def describe_center(
    request: Request, center: Annotated[int, Path(ge=0)], resources: Opened
) -> Response:
    """Describes a center: size, name, the nearest other centers, and examples.

    The examples are its nearest members, then items of each collection.
    """
    centers = opened_lookup(resources).centers
    if center >= len(centers.vectors):
        raise NotFound(
            "there is no such center", remedy=f"ids go from 0 to {len(centers.vectors) - 1}"
        )
    loop = asyncio.get_running_loop()
    description = await within_deadline(
        loop.run_in_executor(resources.compute, _describe, center, resources),
        request.state.deadline,
    )
    return json_answer(description, headers(resources))


def _describe(center: int, resources: Resources) -> dict[str, Any]:
    lookup = opened_lookup(resources)
    centers = lookup.centers
    vector = centers.vectors[center : center + 1]
    near = lookup.scan.nearest(vector, min(_NUM_NEIGHBORS + 1, len(centers.vectors)))
    neighbors = [
        {"id": int(other), "similarity": float(score), "name": centers.name(int(other))}
        for other, score in zip(near.ids[0], near.scores[0], strict=True)
        if other != center
    ]
    items = [
        {"collection": name, "id": match.id, "similarity": match.similarity}
        for name, collection in resources.collections.items()
        # Centers with a mean compare embeddings less the mean: items are not in that space.
        if centers.mean is None
        for match in collection.search(vector, _NUM_NEIGHBORS).matches[0]
    ]
    return {
        **provenance(resources),
        "centers": centers.digest,
        "id": center,
        "size": int(centers.sizes[center]),
        "name": centers.name(center),
        "nearest": neighbors[:_NUM_NEIGHBORS],
        "examples": [*example_members(centers, center), *items],
    }
