"""The readers of request bodies: multipart files, one raw image, or JSON."""

import asyncio
import math
from collections.abc import Collection
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from mlcd.errors import ImageRejected, InvalidInput
from mlcd.service.errors import BadRequest, TooLarge, Unsupported
from mlcd.service.http.json_bounds import check_json
from mlcd.service.http.problems import bad_field
from mlcd.service.http.unknown_names import request_query_names, unknown_name
from mlcd.service.resources import Resources
from mlcd.service.settings import Limits
from mlcd.types import Embeddings, unit_rows

# max_body_bytes bounds the size of a form; this bounds the work of parsing it.
_MAX_FORM_PARTS: Final = 1000
_FILES: Final = "files"
_IMAGE_TYPES: Final = (b"image/", b"application/octet-stream")
_MAX_FIELDS: Final = 64  # more than twice the fields of any route; bounds the validation
MEDIA_TYPES: Final = (
    "multipart/form-data",
    "image/*",
    "application/octet-stream",
    "application/json",
)
_Model = TypeVar("_Model", bound=BaseModel)


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


async def read_images(request: Request, limits: Limits) -> list[bytes | ImageRejected]:
    """Reads the images of a multipart form (field `files`, 1..n) or the one image of a raw body."""
    kind = media_type(request)
    if kind == "multipart/form-data":
        return [*(await read_form(request, limits))[0]]
    if kind.startswith("image/") or kind == "application/octet-stream":
        return [await read_body(request)]
    raise Unsupported(f"the Content-Type must be one of {', '.join(MEDIA_TYPES)}")


async def read_body(request: Request) -> bytes:
    _check_uncompressed(request)
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise BadRequest("the client disconnected") from error


def _check_uncompressed(request: Request) -> None:
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        raise Unsupported(
            "the body must not be compressed", remedy="send it without Content-Encoding"
        )


async def read_json(request: Request, resources: Resources) -> dict[str, Any]:
    """Reads a JSON object; parses it off the event loop."""
    _check_json_type(request)
    return require_object(
        await parse_json(await _read_json_body(request, resources.settings.limits), resources)
    )


async def read_optional_json(request: Request, resources: Resources) -> dict[str, Any] | None:
    """Reads a JSON object; None for a request without a body."""
    body = await _read_json_body(request, resources.settings.limits)
    if not body:
        return None
    _check_json_type(request)
    return require_object(await parse_json(body, resources))


async def parse_json(body: bytes | bytearray, resources: Resources) -> Any:
    """Parses JSON off the event loop, one body at a time, because the parser blocks all threads."""
    loop, limits = asyncio.get_running_loop(), resources.settings.limits
    return await loop.run_in_executor(resources.parsing, load_json, body, limits)


def load_json(body: bytes | bytearray | memoryview, limits: Limits) -> Any:
    """Parses JSON within the limits. Raises TooLarge, and BadRequest if it is not valid JSON."""
    check_json(body, limits)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest("the body must be JSON, not nested too deeply") from error


def _check_json_type(request: Request) -> None:
    # A missing header is refused, too: a page of another origin may send a body without the header
    # and without a preflight request.
    kind = media_type(request)
    if kind != "application/json" and not kind.endswith("+json"):
        raise Unsupported("the body must be JSON", remedy="send Content-Type: application/json")


async def _read_json_body(request: Request, limits: Limits) -> bytearray:
    """Returns the body without the second copy that `request.body()` keeps in the request."""
    _check_uncompressed(request)
    stated_bytes = int(request.headers.get("content-length", "0"))  # validated by the middleware
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if max(stated_bytes, len(body)) > limits.max_json_bytes:
                raise TooLarge(
                    f"the JSON body must have at most {limits.max_json_bytes} bytes",
                    limit="max_json_bytes",
                )
    except ClientDisconnect as error:
        raise BadRequest("the client disconnected") from error
    return body


def require_object(content: Any) -> dict[str, Any]:
    """Returns the content. Raises BadRequest unless it is an object of at most 64 fields."""
    if not isinstance(content, dict):
        raise BadRequest("the body must be a JSON object")
    if len(content) > _MAX_FIELDS:
        raise BadRequest(
            f"the body must have at most {_MAX_FIELDS} fields, got {len(content)}",
            remedy="/openapi.json lists the fields of each route",
        )
    return content


def validate(model: type[_Model], content: dict[str, Any]) -> _Model:
    """Returns the content as a model. Raises BadRequest, which names the first wrong field."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise bad_field(error.errors(include_url=False, include_input=False), model) from None


class _FormParser(MultiPartParser):
    """Starlette's parser, which here accepts a `files` part without a file name if it has an
    image's media type.
    """

    def on_headers_finished(self) -> None:
        part = self._current_part
        _, options = parse_options_header(part.content_disposition)
        kind = dict(part.item_headers).get(b"content-type", b"").lower()
        is_named = b"filename" in options or options.get(b"name") != _FILES.encode()
        if part.content_disposition and not is_named and kind.startswith(_IMAGE_TYPES):
            part.content_disposition += b'; filename="image"'
        super().on_headers_finished()


async def read_form(
    request: Request, limits: Limits, *, texts: Collection[str] = ()
) -> tuple[list[bytes], dict[str, str]]:
    """Returns the images of a multipart form (field `files`, 1..n) and its text fields.

    texts: allowed names of text fields. If a text field is repeated, the last value counts.
    Files stay in the memory that is reserved for the body, so an upload needs no disk space.
    """
    size = limits.max_body_bytes
    parser = _FormParser(
        request.headers,
        request.stream(),
        max_files=_MAX_FORM_PARTS,
        max_fields=_MAX_FORM_PARTS,
        max_part_size=size,
    )
    parser.spool_max_size = size
    try:
        form = await parser.parse()
    # UnicodeError: the form's charset does not decode its texts.
    except (MultiPartException, KeyError, UnicodeError, ClientDisconnect) as error:
        raise BadRequest(
            "the multipart form cannot be read",
            remedy=f"send a well-formed form with at most {limits.max_images} files",
        ) from error
    try:
        names = (_FILES, *texts)
        if unknown := form.keys() - {*names}:
            raise unknown_name(
                unknown, names, where="the form", elsewhere=request_query_names(request)
            )
        files = _require_files(form)
        check_count(len(files), limits)
        fields = {
            name: _require_text(name, value) for name, value in form.items() if name != _FILES
        }
        return [await file.read() for file in files], fields
    finally:
        await form.close()


def _require_files(form: FormData) -> list[UploadFile]:
    files = []
    for value in form.getlist(_FILES):
        if isinstance(value, str):
            raise BadRequest(
                "each part `files` of the form must be a file, got a text",
                remedy='give the part a file name: Content-Disposition: form-data; name="files";'
                ' filename="a.png" (curl: -F files=@a.png)',
                param=_FILES,
            )
        files.append(value)
    if not files:
        raise BadRequest(
            "the form must have at least 1 file, got 0",
            remedy="send images in the field `files`",
            param=_FILES,
        )
    return files


def _require_text(name: str, value: UploadFile | str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"the field `{name}` of the form must be a text, got a file", param=name)
    return value


def check_count(num: int, limits: Limits) -> None:
    if num > limits.max_images:
        raise TooLarge(
            f"a request must have at most {limits.max_images} items, got {num}", limit="max_images"
        )


def embeddings_from_json(value: list[Any], dimension: int, limits: Limits) -> Embeddings:
    """Returns a list of vectors as unit rows [N, D]."""
    check_count(len(value), limits)
    for index, row in enumerate(value):
        has_right_length = isinstance(row, list) and len(row) == dimension
        if not has_right_length or not all(
            type(number) in (int, float) and math.isfinite(number) for number in row
        ):
            raise BadRequest(
                f"embedding {index} must be a vector of {dimension} finite numbers",
                param=f"embeddings[{index}]",
            )
    try:
        return unit_rows(np.asarray(value, dtype=np.float64))
    except InvalidInput as error:
        raise BadRequest(error.message, remedy=error.remedy, param="embeddings") from error
