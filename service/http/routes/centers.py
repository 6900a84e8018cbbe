"""The route that describes one center."""

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Request, Response

from mlcd.errors import NotFound
from mlcd.wire import DescribedCenter, Example, Label
from service.deadline import within_deadline
from service.http.access import Opened
from service.http.answers import headers, provenance
from service.http.auth import needs
from service.http.routes.labels import example_members, opened_lookup
from service.resources import Resources

router = APIRouter(tags=["labels"])

_NUM_NEIGHBORS: Final = 8
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {404: {}, 409: {}, 504: {}}


@router.get(
    "/v1/centers/{center}",
    dependencies=[needs("search")],
    responses=_ERRORS,
    response_model_exclude_unset=True,
)
async def describe_center(
    request: Request, response: Response, center: Annotated[int, Path(ge=0)], resources: Opened
) -> DescribedCenter:
    """Describes a center: size, name, the nearest other centers, and examples.

    The examples are its nearest members, then items of each collection.
    """
    centers = opened_lookup(resources).centers
    if center >= len(centers.vectors):
        raise NotFound(
            "there is no such center", remedy=f"ids go from 0 to {len(centers.vectors) - 1}"
        )
    loop = asyncio.get_running_loop()
    response.headers.update(headers(resources))
    return await within_deadline(
        loop.run_in_executor(resources.compute, _describe, center, resources),
        request.state.deadline,
    )


def _describe(center: int, resources: Resources) -> DescribedCenter:
    lookup = opened_lookup(resources)
    centers = lookup.centers
    vector = centers.vectors[center : center + 1]
    near = lookup.scan.nearest(vector, min(_NUM_NEIGHBORS + 1, len(centers.vectors)))
    neighbors = [
        Label(id=int(other), similarity=float(score), name=centers.name(int(other)))
        for other, score in zip(near.ids[0], near.scores[0], strict=True)
        if other != center
    ]
    items = [
        Example(collection=name, id=match.id, similarity=match.similarity)
        for name, collection in resources.collections.items()
        # Centers with a mean compare embeddings less the mean: items are not in that space.
        if centers.mean is None
        for match in collection.search(vector, _NUM_NEIGHBORS).matches[0]
    ]
    members = [Example(**example) for example in example_members(centers, center)]
    return DescribedCenter(
        **provenance(resources),
        centers=centers.digest,
        id=center,
        size=int(centers.sizes[center]),
        name=centers.name(center),
        nearest=neighbors[:_NUM_NEIGHBORS],
        examples=[*members, *items],
    )
