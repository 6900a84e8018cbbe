"""Near-duplicates within a collection, as far as one request can look."""

import asyncio
import threading
import time
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlcd.collections.collection import Collection
from mlcd.collections.duplicates import duplicate_groups
from mlcd.errors import DeadlineExceeded, InvalidInput
from service.deadline import within_deadline
from service.http.access import Opened
from service.http.answers import headers, json_answer
from service.http.auth import needs
from service.http.bodies import read_optional_json, validated
from service.http.dialects.own.wire import DuplicatesRequest, FoundDuplicates
from service.http.openapi import json_body
from service.http.routes.arrivals import opened_collection
from service.http.routes.collections import Name
from service.telemetry.request import timed

router = APIRouter(tags=["collections"])

_MAX_ITEMS: Final = 50_000
"""All pairs of them are more than a deadline of 30 s allows on two cores."""
_REMEDY: Final = "stop the server and run `mlcd index COLLECTION OUT.jsonl --duplicates`, which takes its time"
_FOUND: Final[dict[int | str, dict[str, Any]]] = {200: {"model": FoundDuplicates}, 404: {}, 409: {}}


@router.post(
    "/v1/collections/{name}/duplicates",
    dependencies=[needs("search")],
    response_class=Response,
    responses=_FOUND,
    openapi_extra={"requestBody": {**json_body(DuplicatesRequest)["requestBody"], "required": False}},
)
async def find_duplicates(name: Name, request: Request, resources: Opened) -> Response:
    """Groups of items that chains of pairs of at least this `similarity` join; every pair is compared.

    At most 50,000 items, within the deadline; `mlcd index --duplicates` has no such bounds.
    """
    collection = await opened_collection(name, request, resources)
    content = await read_optional_json(request, resources)
    asked = validated(DuplicatesRequest, content)
    if len(collection) > _MAX_ITEMS:
        raise InvalidInput(f"{len(collection)} items are more than the {_MAX_ITEMS} of one request", remedy=_REMEDY)
    bound = _Bound(request.state.deadline)
    comparing = partial(_compare, collection, asked.similarity, bound)
    try:
        with timed("compare"):
            groups = await within_deadline(
                asyncio.get_running_loop().run_in_executor(resources.comparing, comparing), request.state.deadline
            )
    except DeadlineExceeded as error:
        raise DeadlineExceeded("the time for a request has passed", remedy=_REMEDY) from error
    finally:
        bound.left.set()
    return json_answer(
        {"collection": name, "similarity": asked.similarity, "groups": groups},
        headers(resources),
    )


class _Bound:
    """The meter of a comparison that ends with its request: by its deadline, or because nobody waits any more."""

    def __init__(self, deadline: float) -> None:
        """deadline: by the loop's clock, which is time.monotonic."""
        self._deadline = deadline
        self.left = threading.Event()

    def advance(self, num: int = 1, **facts: object) -> None:  # noqa: ARG002 - of the protocol
        if self.left.is_set() or time.monotonic() > self._deadline:
            raise DeadlineExceeded("the time for a request has passed")


def _compare(collection: Collection, similarity: float, bound: _Bound) -> list[dict[str, Any]]:
    ids, read = collection.rows()
    groups = duplicate_groups(len(ids), read, similarity, meter=bound)
    return [group.record(ids) for group in groups]
