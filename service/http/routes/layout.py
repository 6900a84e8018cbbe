"""The routes of a collection's layout: points, values to color them by, a legend, and items."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Final, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Query, Request
from numpy.typing import NDArray
from starlette.responses import Response

from mlcd.collections.clusters import Clusters
from mlcd.collections.filters import parse_filter
from mlcd.collections.plane import Plane
from mlcd.collections.port import CollectionPort
from mlcd.collections.searcher import Searcher
from mlcd.errors import Conflict, InvalidInput
from mlcd.service.deadline import within_deadline
from mlcd.service.http.access import AppResources
from mlcd.service.http.answer_budget import PART_BYTES
from mlcd.service.http.answers import (
    JSON,
    RAW,
    PartedAnswer,
    check_answer_bytes,
    compute_answer,
    headers,
    list_answer,
    negotiate,
)
from mlcd.service.http.auth import needs
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.layout_files import CSV, PARQUET, csv_parts, parquet_parts
from mlcd.service.http.layout_values import LayoutValues, values_by_center, values_by_field
from mlcd.service.http.openapi import BINARY
from mlcd.service.http.queries import check_filter
from mlcd.service.http.routes.collections import Name, require_collection
from mlcd.service.http.routes.labels import require_lookup
from mlcd.service.inference.lookup import Lookup
from mlcd.service.resources import Resources
from mlcd.wire.item_search import LayoutItems, LayoutItemsRequest, LayoutLegend

router = APIRouter(tags=["collections"], route_class=JsonRoute)

_Result = TypeVar("_Result")
_ITEMS_PER_BLOCK: Final = 1024  # items whose thumbnails are looked up together
_ITEM_BYTES: Final = 100  # field names and numbers of an item in JSON
_METADATA: Final = "metadata."
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {} for status in (404, 409, 422, 429, 504)
}
_NUMBERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {RAW: BINARY}},
    304: {"description": "The layout has the ETag in If-None-Match"},
    **_ERRORS,
}
_FILES: Final = {
    CSV: {"schema": {"type": "string"}},
    PARQUET: BINARY,
}
_ITEMS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": LayoutItems, "content": _FILES},
    406: {},
    **_ERRORS,
}
FirstRows = Annotated[
    int | None, Query(ge=1, description="number of first rows to return; default: all")
]
ColorBy = Annotated[
    str, Query(min_length=1, max_length=200, description="cluster or metadata.FIELD")
]


@router.get(
    "/v1/collections/{name}/layout",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_NUMBERS,
)
async def get_layout(
    name: Name, request: Request, resources: AppResources, first: FirstRows = None
) -> Response:
    """Returns a point for each item: little-endian float32 [n, 2] in [-1, 1].

    The rows are shuffled by a hash, so the first rows are a random sample. X-Mlcd-Layout has the
    method and the digest of the layout; the layout's other routes use the same order of rows as
    long as the digest stays the same.
    """
    _, layout = await _open_layout(name, request, resources)
    return _binary_answer(request, resources, layout, layout.points, first)


@router.get(
    "/v1/collections/{name}/layout/values",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_NUMBERS,
)
async def get_values(
    name: Name, by: ColorBy, request: Request, resources: AppResources, first: FirstRows = None
) -> Response:
    """Returns a number for each item, in the order of the layout: little-endian int32 [n].

    With by=cluster, the number is the center's id; with a metadata field, the value's index in the
    legend; -1 if the value is unknown.
    """
    collection, layout = await _open_layout(name, request, resources)
    values = await _find_values(by, collection, layout, request, resources)
    numbers = values.numbers.astype("<i4", copy=False)
    return _binary_answer(request, resources, layout, numbers, first, held_bytes=numbers.nbytes)


@router.get(
    "/v1/collections/{name}/layout/legend",
    dependencies=[needs("search")],
    response_model=LayoutLegend,
    responses=_ERRORS,
)
async def get_legend(
    name: Name, by: ColorBy, request: Request, resources: AppResources
) -> Response:
    """Returns the meaning of the values' numbers, the most frequent first, at most 1,000."""
    collection, layout = await _open_layout(name, request, resources)
    values = await _find_values(by, collection, layout, request, resources)
    answer_headers = _layout_headers(resources, layout)
    legend = partial(LayoutLegend, by=by, values=values.legend)
    return await compute_answer(legend, request, resources, answer_headers)


@router.post(
    "/v1/collections/{name}/layout/items",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_ITEMS,
)
async def list_items(
    name: Name, body: LayoutItemsRequest, request: Request, resources: AppResources
) -> Response:
    """Lists items by their rows in the layout, or those inside a polygon.

    With the Accept header text/csv or application/vnd.apache.parquet, the answer is a file of all
    selected items: id, position, x, y and metadata as JSON. In CSV, ids that start with = + - @ or
    a control character get a leading apostrophe, so that no spreadsheet executes them.
    """
    kind = negotiate(request, (JSON, CSV, PARQUET))
    check_filter(body.filter)
    collection, layout = await _open_layout(name, request, resources)
    if body.layout not in (None, layout.digest):
        raise Conflict("the layout has changed", remedy="read the layout again")
    selected_rows = await _compute(request, resources, partial(_select_rows, layout, body))
    if kind == JSON:
        shown_rows = selected_rows[: body.limit]
        num_bytes = await _compute(request, resources, partial(_estimate_bytes, layout, shown_rows))
        check_answer_bytes(num_bytes, resources.settings.limits, remedy="give a smaller `limit`")
        return list_answer(
            {"collection": name, "total": len(selected_rows)},
            _describe_items(collection, layout, shown_rows),
            _layout_headers(resources, layout),
            resources,
            num_items=len(shown_rows),
            num_bytes=num_bytes,
            field="items",
        )
    parts = (csv_parts if kind == CSV else parquet_parts)(layout, selected_rows)
    suffix = "csv" if kind == CSV else "parquet"
    answer_headers = _layout_headers(resources, layout) | {
        "Content-Disposition": f'attachment; filename="{name}.{suffix}"',
        "X-Mlcd-Items": str(len(selected_rows)),
    }
    return PartedAnswer(parts, resources, answer_headers, kind)


async def _open_layout(
    name: str, request: Request, resources: Resources
) -> tuple[CollectionPort, Plane]:
    collection = await require_collection(name, request, resources)
    return collection, await resources.views.layout(collection, deadline=request.state.deadline)


async def _compute(request: Request, resources: Resources, work: Callable[[], _Result]) -> _Result:
    return await within_deadline(
        asyncio.get_running_loop().run_in_executor(resources.compute, work),
        request.state.deadline,
    )


def _layout_headers(resources: Resources, layout: Plane) -> dict[str, str]:
    return {**headers(resources), "X-Mlcd-Layout": f"{layout.method};{layout.digest}"}


def _binary_answer(
    request: Request,
    resources: Resources,
    layout: Plane,
    rows: NDArray[Any],
    first: int | None,
    *,
    held_bytes: int = 0,
) -> Response:
    """held_bytes: bytes of `rows` if they belong to this answer only, else 0."""
    shown_rows = rows[:first]
    data = memoryview(np.ascontiguousarray(shown_rows).ravel().view(np.uint8).data)
    etag = f'"{_compute_tag(layout)}"'
    answer_headers = {
        **_layout_headers(resources, layout),
        "X-Mlcd-Items": str(len(shown_rows)),
        "ETag": etag,
        "Cache-Control": "private, no-cache",
        "Vary": "Authorization, X-API-Key",
    }
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=answer_headers)
    answer_headers["Content-Length"] = str(len(data))
    pieces = (data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES))
    return PartedAnswer(pieces, resources, answer_headers, RAW, held_bytes=held_bytes)


def _compute_tag(layout: Plane) -> str:
    """Returns a tag for the layout and for the state of the collection's metadata."""
    state = layout.state
    return f"{layout.digest}-{state.generation.number}-{state.num_positions}"


async def _find_values(
    by: str,
    collection: CollectionPort,
    layout: Plane,
    request: Request,
    resources: Resources,
) -> LayoutValues:
    if by == "cluster":
        lookup = require_lookup(resources)
        clusters = await resources.views.clusters(
            collection, lookup, deadline=request.state.deadline
        )
        work = partial(_color_by_center, layout, clusters, lookup)
    elif by.startswith(_METADATA) and by != _METADATA:
        work = partial(values_by_field, layout, by.removeprefix(_METADATA))
    else:
        raise InvalidInput("by must be cluster or metadata.FIELD")
    return await _compute(request, resources, work)


def _color_by_center(layout: Plane, clusters: Clusters, lookup: Lookup) -> LayoutValues:
    lookup.follow_names()
    return values_by_center(layout, clusters, lookup.centers)


def _select_rows(layout: Plane, body: LayoutItemsRequest) -> NDArray[np.int64]:
    """Returns the rows of the layout that a request selects."""
    num = len(layout.positions)
    if body.positions is not None and body.polygon is not None:
        raise InvalidInput("the body must have at most one of `positions` and `polygon`, got both")
    if body.positions is not None:
        rows = np.array(body.positions, dtype=np.int64)
        if len(rows) and rows.max() >= num:
            raise InvalidInput(
                f"positions must be below {num}, got {rows.max()}", remedy="read the layout again"
            )
    elif body.polygon is not None:
        rows = layout.inside(np.array(body.polygon, dtype=np.float64))
    else:
        rows = np.arange(num)
    if body.filter is None:
        return rows
    matching = parse_filter(body.filter).matches(layout.state)
    return rows[matching[layout.positions[rows]]]


def _estimate_bytes(layout: Plane, rows: NDArray[np.int64]) -> int:
    """Returns the approximate size of these items in an answer."""
    state = layout.state
    return sum(
        _ITEM_BYTES + len(state.ids[position]) + len(state.metadata[position])
        for position in layout.positions[rows].tolist()
    )


def _describe_items(
    collection: CollectionPort, layout: Plane, rows: NDArray[np.int64]
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields a function for each item, which returns its fields."""
    state = layout.state
    for start in range(0, len(rows), _ITEMS_PER_BLOCK):
        block = rows[start : start + _ITEMS_PER_BLOCK]
        positions = layout.positions[block].tolist()
        ids = [state.ids[position] for position in positions]
        versions = collection.thumbnail_versions(ids)
        for row, position, version in zip(block.tolist(), positions, versions, strict=True):
            yield partial(_describe_item, state, row, position, version)


def _describe_item(state: Searcher, row: int, position: int, version: str | None) -> dict[str, Any]:
    return {
        "position": row,
        "id": state.ids[position],
        "metadata": orjson.Fragment(state.metadata[position]),
        "thumbnail": version,
    }
