"""The requests of a batch: the lines of a JSONL file, or the images of an upload, one request each.

An upload of images has a suffix in its id, see `FileStore.publish`; a JSONL file has none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal

import orjson
import pybase64
from pydantic import BaseModel, Field, ValidationError

from mlcd.errors import MlcdError
from mlcd.service.errors import BadRequest
from mlcd.service.jobs.batches import InputFault
from mlcd.service.jobs.uploaded_images import open_upload

if TYPE_CHECKING:
    from mlcd.images.entries import Entry
    from mlcd.images.source import Source

JSON, RAW = "application/json", "application/octet-stream"
MISSING: Final = InputFault("missing_input", "the input file was deleted")
_MAX_FAULTS: Final = 50  # of an input that are reported
_MAX_LINE_BYTES: Final = 2**26
_ID_CHARS: Final = 512
_JSON_RULE: Final = "a line must be one JSON object"
_RULES: Final = {
    "custom_id": f"custom_id must be a string of 1 to {_ID_CHARS} characters",
    "method": "method must be POST",
    "url": "url must be a string",
    "body": "body must be a JSON object",
}


class _Request(BaseModel):
    """A line of a JSONL file."""

    custom_id: Annotated[str, Field(min_length=1, max_length=_ID_CHARS)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class InputRequest:
    """A request of a batch.

    read_body: returns its body; raises ImageRejected for an image that cannot be read.
    has_one_image: whether the body is an image, or a JSON object of one data-URI and nothing else.
    """

    custom_id: str
    media_type: str
    read_body: Callable[[], bytes]
    has_one_image: bool = False


def holds_images(input_file_id: str) -> bool:
    return bool(Path(input_file_id).suffix)


def count_requests(source: Path, endpoint: str, max_requests: int) -> tuple[int, list[InputFault]]:
    """Returns the number of requests in the input, and what is wrong with it."""
    try:
        num, faults = (
            _count_images(source, max_requests)
            if holds_images(source.name)
            else _count_lines(source, endpoint, max_requests)
        )
    except FileNotFoundError:
        return 0, [MISSING]
    if not num and not faults:
        faults = [InputFault("empty_file", "the file must have at least 1 request, got 0")]
    return num, faults


def read_requests(
    source: Path, num_done: int, *, endpoint: str, model: str, filename: str
) -> Iterator[InputRequest]:
    """Yields the requests of a counted input after the first `num_done`.

    model: name of the served model. filename: that of the upload at its owner.
    """
    if not holds_images(source.name):
        yield from _read_lines(source, num_done)
        return
    images = open_upload(source, filename)
    for entry in islice(images.entries, num_done, None):
        if endpoint == "/v1/labels":
            yield InputRequest(entry.key, RAW, partial(images.read, entry), True)
        else:
            yield InputRequest(entry.key, JSON, partial(_embed_image, images, entry, model))


def _count_images(source: Path, max_requests: int) -> tuple[int, list[InputFault]]:
    if not source.exists():
        return 0, [MISSING]
    try:
        images = open_upload(source, source.name)
        num = len(images.entries)
    except MlcdError:
        images = None
    # the errors of a source name the place of the file on this server
    if images is None or images.problems:
        return 0, [InputFault("damaged_file", "the images of the file cannot be listed")]
    if num > max_requests:
        return num, [
            InputFault("too_many_images", f"at most {max_requests} images in a batch, got {num}")
        ]
    return num, []


def _embed_image(images: "Source", entry: "Entry", model: str) -> bytes:
    """Returns the body of a request for embeddings, with the image as a data-URI."""
    payload = pybase64.b64encode(images.read(entry)).decode()
    uri = f"data:application/octet-stream;base64,{payload}"
    return orjson.dumps({"model": model, "input": [uri]})


def check_endpoint(input_file_id: str, endpoint: str) -> None:
    """Raises BadRequest for an endpoint whose requests cannot be made of images alone."""
    if holds_images(input_file_id) and endpoint == "/v1/classify":
        raise BadRequest(
            "a batch of images must be for /v1/embeddings or /v1/labels, got /v1/classify",
            remedy="send a JSONL file, whose requests have the names of their classes",
            param="endpoint",
        )


def _count_lines(source: Path, endpoint: str, max_lines: int) -> tuple[int, list[InputFault]]:
    seen: set[str] = set()
    faults: list[InputFault] = []
    with source.open("rb") as file:
        for number, content in enumerate(_lines_of(file), 1):
            fault = _fault_of(content, endpoint, seen)
            if fault is not None:
                faults.append(replace(fault, line=number))
            if len(seen) > max_lines:
                fault = InputFault("too_many_lines", f"at most {max_lines} requests in a batch")
                return len(seen), [fault]
            if len(faults) == _MAX_FAULTS:
                break
    return len(seen), faults


def _fault_of(content: bytes, endpoint: str, seen: set[str]) -> InputFault | None:
    """Returns what is wrong with a line; else adds its custom_id to `seen`."""
    try:
        request = _Request.model_validate(orjson.loads(content))
    except orjson.JSONDecodeError:
        return InputFault("invalid_json_line", _JSON_RULE)
    except ValidationError as error:
        path = error.errors(include_url=False, include_input=False)[0]["loc"]
        field = str(path[0]) if path else "json_line"
        return InputFault(f"invalid_{field}", _RULES.get(field, _JSON_RULE))
    if request.url != endpoint:
        return InputFault("invalid_url", f"url must be {endpoint}, the endpoint of the batch")
    if request.custom_id in seen:
        return InputFault("duplicate_custom_id", "custom_id must occur once in the file")
    seen.add(request.custom_id)
    return None


def _read_lines(source: Path, num_done: int) -> Iterator[InputRequest]:
    with source.open("rb") as file:
        for content in islice(_lines_of(file), num_done, None):
            request = orjson.loads(content)
            body = request["body"]
            yield InputRequest(
                request["custom_id"], JSON, partial(orjson.dumps, body), _has_one_image(body)
            )


def _has_one_image(body: dict[str, Any]) -> bool:
    images = body.get("images")
    return (
        body.keys() == {"images"}
        and isinstance(images, list)
        and len(images) == 1
        and isinstance(images[0], str)
        and images[0].startswith("data:")
    )


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines that are not empty. A line of more than _MAX_LINE_BYTES is split into parts,
    which are not JSON.
    """
    while line := file.readline(_MAX_LINE_BYTES):
        if line.strip():
            yield line
