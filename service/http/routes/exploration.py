"""The routes of an exploration: its progress, another number of clusters, and single pictures."""

import asyncio
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from mlcd.errors import ImageRejected, NotFound
from mlcd.images.decode import DecodeLimits
from mlcd.images.thumbnail import Thumbnail, thumbnail
from mlcd.service.deadline import within_deadline
from mlcd.service.explore.exploration_thread import Exploration
from mlcd.service.explore.place_state import COLLECTION
from mlcd.service.http.access import AppResources, check_seen, sees
from mlcd.service.http.auth import needs
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.openapi import BINARY
from mlcd.wire.explored_place import (
    ClusterAgainRequest,
    ExplorationStatus,
    NewPicture,
    SkippedFile,
    SkippedFiles,
)

router = APIRouter(tags=["exploration"], route_class=JsonRoute)
_WEBP: Final = "image/webp"
_MAX_SKIPPED: Final = 500
_SIDES: Final = (512, 1024, 2048)
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {404: {}, 422: {}}


@router.get("/v1/exploration", dependencies=[needs("search")])
async def get_exploration(request: Request) -> ExplorationStatus | None:
    """Returns the progress of the exploration; null if this server does not explore a place."""
    if getattr(request.app.state, "exploration", None) is None or not sees(COLLECTION, request):
        return None
    return _describe_status(_require_exploration(request))


def _describe_status(exploration: Exploration) -> ExplorationStatus:
    now = exploration.board.now
    facts = asdict(now) | {
        "considered": list(now.considered),
        "newest": [NewPicture(id=key, thumbnail=version) for key, version in now.newest],
    }
    return ExplorationStatus(
        place=exploration.place,
        collection=COLLECTION,
        **facts,
        commands=exploration.commands(),
    )


@router.post("/v1/exploration", dependencies=[needs("write")], responses=_ERRORS)
async def cluster_again(body: ClusterAgainRequest, request: Request) -> ExplorationStatus:
    """Clusters the same pictures into another number of clusters, without embedding them again."""
    exploration = _require_exploration(request)
    exploration.cluster_again(body.clusters)
    return _describe_status(exploration)


@router.get("/v1/exploration/skipped", dependencies=[needs("search")], responses={404: {}})
async def list_skipped(
    request: Request, limit: Annotated[int, Query(ge=1, le=_MAX_SKIPPED)] = 100
) -> SkippedFiles:
    """Lists the files that cannot be used, with reasons."""
    exploration = _require_exploration(request)
    files = [
        SkippedFile(key=key, reason=picture.reason or "", detail=picture.detail or "")
        for key, picture in exploration.list_skipped(limit)
    ]
    return SkippedFiles(total=exploration.board.now.skipped, files=files)


@router.get(
    "/v1/exploration/pictures/{id:path}",
    dependencies=[needs("search")],
    response_class=Response,
    responses={200: {"content": {_WEBP: BINARY}}, 404: {}, 422: {}, 504: {}},
)
async def get_picture(
    id: Annotated[str, Path(description="the item's id")],  # noqa: A002 - as in the path
    request: Request,
    resources: AppResources,
    side: Annotated[int, Query(ge=64, le=_SIDES[-1])] = _SIDES[1],
) -> Response:
    """Returns a large picture of the place: upright WebP, with at most `side` pixels per side."""
    exploration = _require_exploration(request)
    limits = DecodeLimits(
        max_bytes=resources.settings.limits.max_body_bytes,
        max_pixels=resources.settings.limits.max_pixels,
    )
    loop, deadline = asyncio.get_running_loop(), request.state.deadline
    try:
        reading = loop.run_in_executor(resources.compute, exploration.read, id)
        data = await within_deadline(reading, deadline)
        key = request.state.key
        owner = object() if key is None else key.id
        work = partial(thumbnail, data, side=side, limits=limits)
        picture: Thumbnail = await within_deadline(
            resources.rendering.run(owner, side * side, work), deadline
        )
    except ImageRejected as error:
        raise NotFound("the picture's file cannot be read any more") from error
    return Response(picture.data, headers={"Cache-Control": "private, no-cache"}, media_type=_WEBP)


def _require_exploration(request: Request) -> Exploration:
    exploration = cast(Exploration | None, getattr(request.app.state, "exploration", None))
    if exploration is None:
        raise NotFound("this server does not explore a place", remedy="run `mlcd explore PHOTOS`")
    check_seen(COLLECTION, request)
    return exploration
