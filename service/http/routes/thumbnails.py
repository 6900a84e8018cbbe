"""The route of an item's thumbnail, a picture that this server rendered."""

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from mlcd.errors import NotFound
from mlcd.service.deadline import within_deadline
from mlcd.service.http.access import AppResources
from mlcd.service.http.answers import headers
from mlcd.service.http.auth import needs
from mlcd.service.http.openapi import BINARY
from mlcd.service.http.routes.collections import Name, require_collection

WEBP: Final = "image/webp"
_LAST_SEGMENT: Final = b"/thumbnail"
_FOREVER: Final = "private, max-age=31536000, immutable"
_REVALIDATED: Final = "private, no-cache"
_KEYS: Final = "Authorization, X-API-Key"
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {WEBP: BINARY}},
    304: {"description": "The picture has the ETag in If-None-Match"},
    **{status: {} for status in (404, 409, 422, 504)},
}


class _LiteralRoute(APIRoute):
    """A route whose last path segment must not be percent-encoded.

    In the decoded path, the item `a/thumbnail` looks like the thumbnail of the item `a`. So this
    route takes such a path with any method, and refuses all but its own: no other route may change
    the item.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        raw = scope.get("raw_path") or scope["path"].encode()
        if not raw.partition(b"?")[0].endswith(_LAST_SEGMENT):
            return Match.NONE, {}
        match, child_scope = super().matches(scope)
        return Match.NONE if match == Match.NONE else Match.FULL, child_scope


router = APIRouter(tags=["collections"], route_class=_LiteralRoute)


@router.get(
    "/v1/collections/{name}/items/{id:path}/thumbnail",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_ANSWERS,
)
async def get_thumbnail(
    name: Name,
    id: Annotated[  # noqa: A002 - as in the path
        str,
        Path(
            description="percent-encoded; a slash needs no encoding, except before `thumbnail`",
            json_schema_extra={"minLength": 1},
        ),
    ],
    request: Request,
    resources: AppResources,
    v: Annotated[str | None, Query(description="the thumbnail's version, from the item")] = None,
) -> Response:
    """Returns an item's thumbnail: WebP, upright, without metadata.

    With the current version as `v`, browsers may cache it forever; otherwise they revalidate it.
    """
    collection = await require_collection(name, request, resources)
    picture = await within_deadline(
        asyncio.get_running_loop().run_in_executor(resources.compute, collection.thumbnail, id),
        request.state.deadline,
    )
    if picture is None:
        raise NotFound(
            "the item was added without a thumbnail", remedy="add it again with its image"
        )
    etag = f'"{picture.version}"'
    answer_headers = {
        **headers(resources),
        "ETag": etag,
        "Cache-Control": _FOREVER if v == picture.version else _REVALIDATED,
        "Vary": _KEYS,
    }
    if etag in _read_tags(request):
        return Response(status_code=304, headers=answer_headers)
    return Response(picture.data, 200, answer_headers, WEBP)


def _read_tags(request: Request) -> list[str]:
    """Returns the tags of If-None-Match, without the prefix of weak tags."""
    tags = ",".join(request.headers.getlist("if-none-match"))
    return [tag.strip().removeprefix("W/") for tag in tags.split(",")]
