"""The routes of batch jobs, which workers do."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.sse import format_sse_event
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlcd.collections.item import check_name
from mlcd.errors import Conflict, MlcdError
from mlcd.label_job import LabelJob
from mlcd.locations import is_url
from mlcd.service.errors import BadRequest, OutsideKey
from mlcd.service.http.access import AppResources, sees
from mlcd.service.http.answers import JSON
from mlcd.service.http.auth import needs
from mlcd.service.http.job_answers import describe_failure, describe_job
from mlcd.service.http.job_requests import place_upload, read_job
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.http.openapi import reference
from mlcd.service.http.queries import check_top
from mlcd.service.http.routes.files import owner_of, require_batches
from mlcd.service.jobs import job as jobs
from mlcd.service.jobs.job import FINISHED, Event, JobSpec
from mlcd.service.jobs.roots import Roots
from mlcd.service.jobs.service import JobService
from mlcd.service.keys.file import Key
from mlcd.service.resources import Resources
from mlcd.service.timings import EVENTS_HEARTBEAT_S, EVENTS_POLL_S, EVENTS_RETRY_MS
from mlcd.wire.queued_jobs import (
    FailedShard,
    FailureList,
    Job,
    JobList,
    JobRequest,
    JobState,
    UploadedImages,
)

router = APIRouter(tags=["jobs"], route_class=JsonRoute)
_Result = TypeVar("_Result")

_EVENTS: Final = "text/event-stream"
# The greatest number of an event or a shard: every reader of JSON takes it exactly.
_MAX_NUMBER: Final = 2**53
_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {status: {} for status in (409, 503, 504)}
_ONE: Final[dict[int | str, dict[str, Any]]] = {404: {}, **_REFUSALS}
_LIST: Final[dict[int | str, dict[str, Any]]] = {422: {}, **_REFUSALS}
_LOCATION: Final[dict[str, Any]] = {
    "Location": {"description": "of the job", "schema": {"type": "string"}}
}
_ACCEPTED: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "model": Job,
        "description": "accepted before, with the same Idempotency-Key",
        "headers": _LOCATION,
    },
    202: {"description": "accepted", "headers": _LOCATION},
    403: {},
    404: {},
    **_REFUSALS,
}
# One event, as OpenAPI 3.2 has it under `itemSchema`, which 3.1 does not know.
_EVENT: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "event": {"type": "string"},
        "id": {"type": "string"},
        "retry": {"type": "integer", "minimum": 0},
        "data": {"type": "string", "contentMediaType": JSON, "contentSchema": reference(Job)},
    },
}
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    429: {},
    200: {
        "content": {_EVENTS: {"schema": _EVENT}},
        "description": "events named `job`, each a job",
    },
    204: {"description": "the job has ended and all its events were sent"},
    404: {},
    **_REFUSALS,
}


@router.post("/v1/jobs", dependencies=[needs("jobs")], status_code=202, responses=_ACCEPTED)
async def submit(
    body: JobRequest,
    request: Request,
    response: Response,
    resources: AppResources,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Job:
    """Submits a job that labels, embeds or indexes all images of an input that workers can read, or
    curates embeddings. It labels, embeds and indexes uploaded images, too.

    The job is done with the model that is served now. A second request with one Idempotency-Key
    gets the job of the first.
    """
    service = _job_service(resources)
    spec, key = _spec(read_job(body), request, resources), _key_of_client(request, idempotency_key)
    if isinstance(body.input, UploadedImages):
        if spec.kind == "index" and resources.settings.collections.store is not None:
            raise Conflict(
                "an uploaded file cannot become a collection here: this server keeps its"
                " collections in a database",
                remedy="add the images by POST /v1/collections/{name}/items",
            )
        place = partial(
            place_upload, require_batches(resources).files, spec, body, owner_of(request)
        )
    else:
        place = partial(_place, service, spec)
    accept = partial(_accept, service, place, request.state.key, key)
    job, new = await service.ask(accept, deadline=request.state.deadline)
    response.status_code = 202 if new else 200
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return describe_job(job)


@router.get("/v1/jobs", dependencies=[needs("jobs")], responses=_LIST)
async def list_jobs(
    request: Request,
    resources: AppResources,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: str | None = None,
    state: JobState | None = None,
) -> JobList:
    """Lists all jobs, newest first, page by page; a key for some collections lists its own."""
    service = _job_service(resources)
    look = partial(
        service.queue.page, limit=limit, cursor=cursor, state=state, owner=_owner(request)
    )
    page = await service.ask(look, deadline=request.state.deadline)
    return JobList(jobs=[describe_job(job) for job in page.jobs], cursor=page.cursor)


@router.get("/v1/jobs/{job_id}", dependencies=[needs("jobs")], responses=_ONE)
async def describe(job_id: str, request: Request, resources: AppResources) -> Job:
    """Describes a job as it stands."""
    service = _job_service(resources)
    look = _of_client(request, service, job_id, service.queue.get)
    return describe_job(await service.ask(look, deadline=request.state.deadline))


@router.get("/v1/jobs/{job_id}/failures", dependencies=[needs("jobs")], responses=_ONE)
async def list_failures(
    job_id: str,
    request: Request,
    resources: AppResources,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[int, Query(ge=-1, le=_MAX_NUMBER)] = -1,
) -> FailureList:
    """Lists the failed shards with reasons, page by page.

    A retry empties the list and tries them again.
    """
    service = _job_service(resources)
    read = partial(service.queue.failures, limit=limit, after=cursor)
    look = _of_client(request, service, job_id, read)
    page = await service.ask(look, deadline=request.state.deadline)
    failures = [
        FailedShard(
            shard=failure.shard, images=failure.images, problem=describe_failure(failure.problem)
        )
        for failure in page.failures
    ]
    return FailureList(failures=failures, cursor=page.cursor)


@router.delete("/v1/jobs/{job_id}", dependencies=[needs("jobs")], responses=_ONE)
async def cancel(job_id: str, request: Request, resources: AppResources) -> Job:
    """Cancels a job: workers stop within seconds, and what they have written is removed."""
    service = _job_service(resources)
    change = _of_client(request, service, job_id, service.queue.cancel)
    return describe_job(await service.ask(change, deadline=request.state.deadline))


@router.post("/v1/jobs/{job_id}/retry", dependencies=[needs("jobs")], responses=_ONE)
async def retry(job_id: str, request: Request, resources: AppResources) -> Job:
    """Does again what has failed; of a canceled job, everything."""
    service = _job_service(resources)
    change = _of_client(request, service, job_id, service.queue.retry)
    return describe_job(await service.ask(change, deadline=request.state.deadline))


@router.get(
    "/v1/jobs/{job_id}/events",
    dependencies=[needs("jobs")],
    response_class=Response,
    responses=_STREAM,
)
async def watch(
    job_id: str,
    request: Request,
    resources: AppResources,
    last_event_id: Annotated[int | None, Header(ge=0, le=_MAX_NUMBER)] = None,
) -> Response:
    """Sends every change of a job as server-sent events.

    It begins with the changes after Last-Event-ID, or else with the job as it stands. A stream ends
    with its job, or within a request's deadline: then come back with Last-Event-ID, as browsers do
    by themselves.
    """
    service = _job_service(resources)
    deadline: float = request.state.deadline
    after = last_event_id or 0
    read = partial(service.queue.events, after=after)
    events = await service.ask(_of_client(request, service, job_id, read), deadline=deadline)
    if not events:
        job = await service.ask(partial(service.queue.get, job_id), deadline=deadline)
        if job.state in FINISHED:
            return Response(status_code=204)
    if last_event_id is None:
        events = events[-1:]
    stream = _stream(service, resources, job_id, events, after=after, deadline=deadline)
    return _EventStream(stream, resources)


class _EventStream(StreamingResponse):
    """A stream of events, which holds one of the places for streams while it is sent. Raises
    Overloaded before it begins.
    """

    def __init__(self, events: AsyncIterator[bytes], resources: Resources) -> None:
        # nginx holds answers back until it has enough of them.
        super().__init__(events, media_type=_EVENTS, headers={"X-Accel-Buffering": "no"})
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources.admission.streams.hold(1, owner=None):
            await super().__call__(scope, receive, send)


async def _stream(
    service: JobService,
    resources: Resources,
    job_id: str,
    events: Sequence[Event],
    *,
    after: int,
    deadline: float,
) -> AsyncIterator[bytes]:
    now = asyncio.get_running_loop().time
    yield format_sse_event(retry=EVENTS_RETRY_MS)
    spoken = now()
    while True:
        for event in events:
            # In ASCII: names of files may hold U+2028 and its like, at which formatters and
            # clients break lines.
            data = json.dumps(describe_job(event.job).model_dump(mode="json"))
            yield format_sse_event(data_str=data, event="job", id=str(event.id))
            after, spoken = event.id, now()
            if event is events[-1] and event.job.state in FINISHED:
                return
        if now() + EVENTS_POLL_S >= deadline or resources.readiness.draining:
            return
        await asyncio.sleep(EVENTS_POLL_S)
        if now() - spoken >= EVENTS_HEARTBEAT_S:
            yield format_sse_event(comment="")
            spoken = now()
        try:
            events = await service.ask(
                partial(service.queue.events, job_id, after), deadline=deadline
            )
        except MlcdError:  # the answer has begun: the client comes back and is told
            return


def _job_service(resources: Resources) -> JobService:
    if resources.jobs is None:
        raise Conflict(
            "this server takes no jobs",
            remedy="set MLCD_JOBS__ROOTS to the folders that they may use",
        )
    return resources.jobs


def _owner(request: Request) -> str | None:
    """Returns whose jobs a request may see: a key for some collections sees those that it
    submitted, and others see all (None).
    """
    key: Key | None = request.state.key
    return None if key is None or key.collections is None else key.id


def _of_client(
    request: Request, service: JobService, job_id: str, work: Callable[[str], _Result]
) -> Callable[[], _Result]:
    """Returns the work on a job, which raises NotFound where the client does not see the job."""
    owner = _owner(request)

    def run() -> _Result:
        if owner is not None:
            service.queue.check_owner(job_id, owner)
        return work(job_id)

    return run


def _spec(job: LabelJob, request: Request, resources: Resources) -> JobSpec:
    """Returns the job for the served model and centers; its paths are not looked at yet."""
    centers = None
    if job.url_column is not None and resources.settings.fetch.url_options is None:
        raise Conflict(
            "this server fetches no images from URLs",
            remedy="set MLCD_FETCH__ALLOW to the hosts that its workers may ask",
        )
    if job.kind == "label":
        check_top(job.top, resources)
    if job.needs_centers:
        centers = resources.model.data.require_lookup().centers.digest
    if job.kind == "index":
        if is_url(job.output):
            raise BadRequest("output of index jobs must be a folder", param="output")
        # whatever lies among a server's collections has to be one
        name = check_name(PurePosixPath(job.output).name)
        if not sees(name, request):
            raise OutsideKey(param="output")
    return JobSpec(**asdict(job), fingerprint=resources.encoder.fingerprint, centers=centers)


def _place(service: JobService, spec: JobSpec, key: str | None) -> JobSpec:
    """Returns the job with its paths resolved. They are the same for every key."""
    del key
    return replace(
        spec,
        input=service.roots.resolve_input(spec.input),
        output=service.roots.resolve_output(spec.output),
    )


def _accept(
    service: JobService,
    place: Callable[[str | None], JobSpec],
    client: Key | None,
    key: str | None,
) -> tuple[jobs.Job, bool]:
    spec = place(key)
    if key is not None and (earlier := service.queue.find_submitted(key)) is not None:
        # Its output may be there by now, and another model may be served.
        if earlier.spec != replace(
            spec, fingerprint=earlier.spec.fingerprint, centers=earlier.spec.centers
        ):
            raise Conflict("this idempotency key belongs to another job", remedy="use a new key")
        return earlier, False
    if spec.upload is None:
        _check_places(service.roots, spec)
    elif spec.kind == "index" and Path(spec.output).exists():
        name = Path(spec.output).name
        raise Conflict(f"the collection {name} exists", remedy="give another name")
    return service.queue.submit(spec, key=key, owner=None if client is None else client.id)


def _check_places(roots: Roots, spec: JobSpec) -> None:
    if spec.kind == "curate":
        roots.check_embeddings(spec.input)
    else:
        roots.check_input(spec.input, url_column=spec.url_column)
    roots.check_output(spec.output, input_of_job=spec.input)


def _key_of_client(request: Request, key: str | None) -> str | None:
    """Returns the key as this client's own: two clients may choose the same one."""
    client = request.state.key
    return key if key is None or client is None else f"{client.id} {key}"
