"""The routes of files and of uploads in parts, as OpenAI's clients call them."""

import asyncio
from functools import partial
from typing import Annotated, Any, BinaryIO, Final, Literal, cast, get_args

from fastapi import APIRouter, Query, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse

from mlcd.errors import Conflict
from mlcd.service.errors import BadRequest, Unsupported
from mlcd.service.http.access import AppResources
from mlcd.service.http.auth import needs
from mlcd.service.http.bodies import media_type
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.jobs.batches import BatchStore
from mlcd.service.jobs.files import FileDraft, StoredFile
from mlcd.service.jobs.uploads import Upload, UploadStore
from mlcd.service.keys.file import Key
from mlcd.service.resources import Resources
from mlcd.wire.batches import (
    CompleteUpload,
    DeletedFile,
    ExpiresAfter,
    FileList,
    FileObject,
    FilePurpose,
    StoredPurpose,
    UploadObject,
    UploadPart,
    UploadRequest,
)

router = APIRouter(tags=["batches"], route_class=JsonRoute)

_PURPOSES: Final[tuple[FilePurpose, ...]] = get_args(FilePurpose)
_MOST_FIELDS: Final = 8
_MOST_FIELD_BYTES: Final = 4096
_NAME_CHARS: Final = 255
_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {409: {}, 503: {}}
_ONE: Final[dict[int | str, dict[str, Any]]] = {404: {}, **_REFUSALS}
_STORES: Final[dict[int | str, dict[str, Any]]] = {507: {}, **_REFUSALS}
_CONTENT: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}},
    **_ONE,
}


def _form_body(properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "required": [*properties][:2], "properties": properties}
    return {
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    }


_BINARY: Final = {"type": "string", "format": "binary"}
_FILE_FORM: Final = _form_body(
    {
        "file": _BINARY,
        "purpose": {"type": "string", "enum": [*_PURPOSES]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 1},
    }
)
_PART_FORM: Final = _form_body({"data": _BINARY})


@router.post("/v1/files", dependencies=[needs("jobs")], responses=_STORES, openapi_extra=_FILE_FORM)
async def upload(request: Request, resources: AppResources) -> FileObject:
    """Stores a file: requests for a batch, or images for a job (one image, or a zip, tar or parquet
    file of many).

    It goes to the disk as it comes, so its size takes no memory.
    """
    store = require_batches(resources).files
    with await asyncio.to_thread(store.begin, owner_of(request)) as draft:
        filename, fields = await _read_form(request, draft, "file")
        purpose = fields.pop("purpose", None)
        if purpose not in _PURPOSES:
            raise BadRequest(f"purpose must be {' or '.join(_PURPOSES)}", param="purpose")
        keep_s = _life_of(fields)
        file = await asyncio.to_thread(draft.finish, filename, purpose, keep_s)
    return describe_file(file)


@router.get("/v1/files", dependencies=[needs("jobs")], responses=_REFUSALS)
async def list_files(
    request: Request,
    resources: AppResources,
    purpose: StoredPurpose | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> FileList:
    """Lists the files of this key, newest first."""
    store = require_batches(resources).files
    look = partial(
        store.page,
        owner_of(request),
        limit=limit,
        after=after,
        purpose=purpose,
        newest_first=order == "desc",
    )
    files, has_more = await asyncio.to_thread(look)
    return FileList(
        object="list",
        data=[describe_file(file) for file in files],
        first_id=files[0].id if files else None,
        last_id=files[-1].id if files else None,
        has_more=has_more,
    )


@router.get("/v1/files/{file_id}", dependencies=[needs("jobs")], responses=_ONE)
async def describe(file_id: str, request: Request, resources: AppResources) -> FileObject:
    """Describes a file."""
    store = require_batches(resources).files
    return describe_file(await asyncio.to_thread(store.find, file_id, owner_of(request)))


@router.get(
    "/v1/files/{file_id}/content",
    dependencies=[needs("jobs")],
    response_class=FileResponse,
    responses=_CONTENT,
)
async def content(file_id: str, request: Request, resources: AppResources) -> FileResponse:
    """Sends the content of a file; ranges may be asked for."""
    store = require_batches(resources).files
    file = await asyncio.to_thread(store.find, file_id, owner_of(request))
    return FileResponse(
        store.path(file.id), media_type="application/octet-stream", filename=file.filename
    )


@router.delete("/v1/files/{file_id}", dependencies=[needs("jobs")], responses=_ONE)
async def delete(file_id: str, request: Request, resources: AppResources) -> DeletedFile:
    """Deletes a file. A batch that still needs it fails."""
    store = require_batches(resources).files
    await asyncio.to_thread(store.delete, file_id, owner_of(request))
    return DeletedFile(id=file_id, object="file", deleted=True)


@router.post("/v1/uploads", dependencies=[needs("jobs")], responses=_STORES)
async def begin_upload(
    body: UploadRequest, request: Request, resources: AppResources
) -> UploadObject:
    """Begins an upload in parts, for a file that one request cannot bring in time."""
    keep_s = None if body.expires_after is None else float(body.expires_after.seconds)
    uploads = UploadStore(require_batches(resources).files)
    return _describe_upload(
        await asyncio.to_thread(
            partial(
                uploads.create,
                owner_of(request),
                body.filename,
                body.bytes,
                purpose=body.purpose,
                keep_s=keep_s,
            )
        )
    )


@router.post(
    "/v1/uploads/{upload_id}/parts",
    dependencies=[needs("jobs")],
    responses={404: {}, **_STORES},
    openapi_extra=_PART_FORM,
)
async def add_part(upload_id: str, request: Request, resources: AppResources) -> UploadPart:
    """Adds a part. Parts may come in any order, and several at once."""
    uploads, owner = UploadStore(require_batches(resources).files), owner_of(request)
    with await asyncio.to_thread(uploads.begin_part, upload_id, owner) as draft:
        await _read_form(request, draft, "data")
        part_id = await asyncio.to_thread(uploads.add_part, upload_id, owner, draft)
    upload = await asyncio.to_thread(uploads.find, upload_id, owner)
    return UploadPart(
        id=part_id, object="upload.part", created_at=int(upload.created_s), upload_id=upload_id
    )


@router.post(
    "/v1/uploads/{upload_id}/complete",
    dependencies=[needs("jobs")],
    responses={404: {}, 422: {}, **_STORES},
)
async def complete_upload(
    upload_id: str, body: CompleteUpload, request: Request, resources: AppResources
) -> UploadObject:
    """Makes a file of the parts, in the order of `part_ids`."""
    uploads = UploadStore(require_batches(resources).files)
    complete = partial(uploads.complete, upload_id, owner_of(request), body.part_ids, body.md5)
    done, file = await asyncio.to_thread(complete)
    return _describe_upload(done, file)


@router.post("/v1/uploads/{upload_id}/cancel", dependencies=[needs("jobs")], responses=_ONE)
async def cancel_upload(upload_id: str, request: Request, resources: AppResources) -> UploadObject:
    """Ends an upload and removes its parts."""
    uploads = UploadStore(require_batches(resources).files)
    return _describe_upload(await asyncio.to_thread(uploads.cancel, upload_id, owner_of(request)))


def require_batches(resources: Resources) -> BatchStore:
    """Returns the files and batches. Raises Conflict where the server keeps none."""
    if resources.batches is None:
        raise Conflict(
            "this server keeps no files", remedy="give it a state directory: mlcd serve --state DIR"
        )
    return resources.batches


def owner_of(request: Request) -> str | None:
    """Returns the id of the request's API key; None on a server without keys."""
    key: Key | None = request.state.key
    return None if key is None else key.id


class _DraftFile:
    """A draft as the file of a form. Starlette writes to it in a thread, as it is not in memory."""

    _rolled = True

    def __init__(self, draft: FileDraft) -> None:
        self.write = draft.write

    def seek(self, offset: int) -> None:
        """Does nothing: the parser rewinds files for their readers, and this one has none."""

    def close(self) -> None:
        """Does nothing: the draft is closed by its own context."""


class _DraftParser(MultiPartParser):
    """Starlette's parser, which writes the file of the form to a draft and not to a temporary."""

    def __init__(self, request: Request, draft: FileDraft, field: str) -> None:
        super().__init__(
            request.headers,
            request.stream(),
            max_files=1,
            max_fields=_MOST_FIELDS,
            max_part_size=_MOST_FIELD_BYTES,
        )
        self._draft, self._field = draft, field

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        file = self._current_part.file
        if file is not None:
            if self._current_part.field_name != self._field:
                raise MultiPartException(f"the file must be in the field `{self._field}`")
            file.file.close()
            file.file = cast("BinaryIO", _DraftFile(self._draft))


async def _read_form(request: Request, draft: FileDraft, field: str) -> tuple[str, dict[str, str]]:
    """Writes the form's file to the draft, and returns its name and the text fields.

    Raises BadRequest, Unsupported, and what the draft raises.
    """
    if media_type(request) != "multipart/form-data":
        raise Unsupported(
            "this route takes a form", remedy="send Content-Type: multipart/form-data"
        )
    try:
        form = await _DraftParser(request, draft, field).parse()
    except (MultiPartException, KeyError, UnicodeError, ClientDisconnect) as error:
        raise BadRequest(
            "the multipart form cannot be read", remedy=f"send one file in the field `{field}`"
        ) from error
    files = [value for value in form.values() if isinstance(value, UploadFile)]
    if not files:
        raise BadRequest(f"the form must have a file in the field `{field}`", param=field)
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    return (files[0].filename or "file")[:_NAME_CHARS], fields


def _life_of(fields: dict[str, str]) -> float | None:
    """Returns the seconds of `expires_after`. Raises BadRequest for other fields."""
    seconds = fields.pop("expires_after[seconds]", None)
    anchor = fields.pop("expires_after[anchor]", "created_at")
    if fields:
        raise BadRequest("the form has a field that is not known here", param=min(fields))
    if seconds is None:
        return None
    if anchor != "created_at" or not (seconds.isascii() and seconds.isdigit() and int(seconds)):
        raise BadRequest(
            "expires_after must have anchor created_at and seconds of at least 1",
            param="expires_after",
        )
    return float(ExpiresAfter(anchor="created_at", seconds=min(int(seconds), 2**31)).seconds)


def describe_file(file: StoredFile) -> FileObject:
    assert file.purpose != "upload_part"
    return FileObject(
        id=file.id,
        object="file",
        bytes=file.bytes,
        created_at=int(file.created_s),
        expires_at=int(file.expires_s),
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
        sha256=file.sha256,
    )


def _describe_upload(upload: Upload, file: StoredFile | None = None) -> UploadObject:
    return UploadObject(
        id=upload.id,
        object="upload",
        bytes=upload.bytes,
        created_at=int(upload.created_s),
        expires_at=int(upload.expires_s),
        filename=upload.filename,
        purpose=upload.purpose,
        status=upload.state,
        file=None if file is None else describe_file(file),
    )
