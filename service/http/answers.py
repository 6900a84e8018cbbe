"""Answers that contain arrays: contiguous float32, written directly in the wire format.

Large JSON answers are written in parts, off the event loop, and are never in memory as a whole.
"""

import asyncio
import io
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
from fastapi import Request
from numpy.typing import NDArray
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlcd.service.deadline import within_deadline
from mlcd.service.errors import NotAcceptable, TooLarge
from mlcd.service.http.answer_budget import PART_BYTES, announce_answer
from mlcd.service.inference.outcomes import Encoded
from mlcd.service.resources import Resources
from mlcd.service.settings import Limits

JSON: Final = "application/json"
RAW: Final = "application/octet-stream"
NPY: Final = "application/x-npy"
ARROW: Final = "application/vnd.apache.arrow.stream"
_MAX_CACHED: Final = 256  # Accept headers whose preferred media type is cached
_MAX_CACHED_CHARS: Final = 256  # longest header in the cache
_QUOTED: Final = re.compile(r'"(?:\\.?|[^"\\])*+"?')  # a parameter's value, may contain commas
_WEIGHT: Final = re.compile(r"0?\.\d+|0\.?|1(?:\.0*)?")
# An answer with more entries is sent in parts; writing this number takes about a millisecond.
_MAX_SMALL_ITEMS: Final = 2048


def json_answer(content: Any, headers: dict[str, str] | None = None) -> Response:
    """Answers in JSON; orjson writes numpy arrays without converting them to Python floats."""
    return Response(to_json(content), headers=headers, media_type=JSON)


def to_json(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def to_npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def provenance(resources: Resources) -> dict[str, Any]:
    """Returns the fields about the model that every answer of our own routes has."""
    return {
        "model": resources.encoder.name,
        "fingerprint": resources.encoder.fingerprint,
        "preprocess_version": resources.encoder.preprocess.version,
    }


def headers(resources: Resources, encoded: Encoded | None = None) -> dict[str, str]:
    """Returns the model's headers, the same in every dialect and for binary answers.

    The middleware adds the headers of `Resources.stamp` to every answer. `encoded` adds the stages
    as Server-Timing and, if the embeddings are rounded, their type as X-Mlcd-Rounded.
    """
    return {
        "X-Mlcd-Dimension": str(resources.encoder.dimension),
        **(
            {}
            if encoded is None or encoded.rounded is None
            else {"X-Mlcd-Rounded": encoded.rounded}
        ),
        **({} if encoded is None else {"Server-Timing": encoded.timings.server_timing()}),
    }


def negotiate(request: Request, offered: tuple[str, ...]) -> str:
    """Returns the media type that the Accept header prefers (RFC 9110, 12.5.1).

    The most specific range that covers a type sets its weight; 0 excludes the type. If weights tie,
    a type that the header names goes before a type that a wildcard covers; if both tie, the first
    of `offered` wins. Raises NotAcceptable if the header accepts none of them.
    """
    accept = ",".join(request.headers.getlist("accept"))
    return (_choose if len(accept) > _MAX_CACHED_CHARS else _choose_cached)(accept, offered)


def _choose(accept: str, offered: tuple[str, ...]) -> str:
    accept = _QUOTED.sub('""', accept)
    elements = [element for element in accept.split(",") if element.strip()]
    ranges = [_parse_range(element) for element in elements or ["*/*"]]
    preferred = max(offered, key=partial(_weigh, ranges))
    weight, _ = _weigh(ranges, preferred)
    if weight == 0:
        raise NotAcceptable(
            f"the Accept header must allow one of {', '.join(offered)}",
            remedy="change the header, or leave it out",
        )
    return preferred


_choose_cached = lru_cache(_MAX_CACHED)(_choose)


class _MediaRange(NamedTuple):
    """One element of an Accept header. has_parameters: whether it has any besides the weight."""

    kind: str
    has_parameters: bool
    weight: float

    def specificity(self, offer: str) -> int:
        """Returns how specific the range is for a media type; 0 if it does not cover the type.

        offer: media type without parameters.
        """
        if self.kind == offer:
            return 3 if self.has_parameters else 4
        if self.kind == offer.partition("/")[0] + "/*":
            return 2
        return 1 if self.kind in ("*/*", "*") else 0


def _parse_range(element: str) -> _MediaRange:
    kind, *parameters = (piece.strip().lower() for piece in element.split(";"))
    weights = [piece[2:] for piece in parameters if piece.startswith("q=")]
    if not all(map(_WEIGHT.fullmatch, weights)):
        # A range with an unreadable weight covers no media type.
        return _MediaRange("", has_parameters=False, weight=0.0)
    weight = float(weights[0]) if weights else 1.0
    return _MediaRange(kind, has_parameters=len(parameters) > len(weights), weight=weight)


def _weigh(ranges: list[_MediaRange], offer: str) -> tuple[float, int]:
    """Returns a media type's weight and the specificity of the range that sets the weight."""
    specificity, weight = max(
        (media_range.specificity(offer), media_range.weight) for media_range in ranges
    )
    return (weight, specificity) if specificity else (0.0, 0)


def list_answer(
    content: dict[str, Any],
    results: Iterable[Callable[[], Any]],
    answer_headers: dict[str, str],
    resources: Resources,
    *,
    num_items: int,
    num_bytes: int = 0,
    field: str = "results",
    held_bytes: int = 0,
) -> Response:
    """Answers with `content` and the results as its last field; each is computed when written.

    num_items, num_bytes: approximate size of all results together. A small answer is sent in one
    piece. field: name of the last field. held_bytes: see `PartedAnswer`.
    """
    return stream_json_response(
        {**content, field: (make() for make in results)},
        answer_headers,
        resources,
        num_items=num_items,
        num_bytes=num_bytes,
        held_bytes=held_bytes,
    )


def stream_json_response(
    content: dict[str, Any],
    answer_headers: dict[str, str],
    resources: Resources,
    *,
    num_items: int,
    num_bytes: int = 0,
    held_bytes: int = 0,
) -> Response:
    """Answers with `content`, see `json_pieces`; a small answer is sent in one piece."""
    pieces = json_pieces(content)
    if num_items <= _MAX_SMALL_ITEMS and num_bytes <= PART_BYTES:
        return Response(b"".join(pieces), 200, answer_headers, JSON)
    return PartedAnswer(pieces, resources, answer_headers, JSON, held_bytes=held_bytes)


async def compute_answer(
    make: Callable[[], Any],
    request: Request,
    resources: Resources,
    answer_headers: dict[str, str] | None = None,
    *,
    exclude_unset: bool = False,
) -> Response:
    """Answers in JSON with the result of `make`; both run off the event loop.

    exclude_unset: leave out fields of a pydantic model that were not set.

    For answers with a bounded number of entries: the answer is in memory as a whole.
    """

    def write_body() -> bytes:
        content = make()
        if isinstance(content, BaseModel):
            return content.model_dump_json(by_alias=True, exclude_unset=exclude_unset).encode()
        return to_json(content)

    writing = asyncio.get_running_loop().run_in_executor(resources.compute, write_body)
    body = await within_deadline(writing, request.state.deadline)
    return Response(body, 200, answer_headers, JSON)


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yields JSON in pieces. An iterator, also inside a dict or another iterator, becomes a list
    with one piece per item; a list is written as one piece.
    """
    if isinstance(value, Iterator):
        yield b"["
        for index, item in enumerate(value):
            if index:
                yield b","
            yield from json_pieces(item)
        yield b"]"
    elif isinstance(value, dict) and any(map(_has_parts, value.values())):
        yield b"{"
        for index, (name, item) in enumerate(value.items()):
            yield (b"," if index else b"") + to_json(name) + b":"
            yield from json_pieces(item)
        yield b"}"
    else:
        yield to_json(value)


def _has_parts(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_parts, value.values()))
    return isinstance(value, Iterator)


def check_answer_bytes(num_bytes: int, limits: Limits, *, remedy: str) -> None:
    """Raises TooLarge if an answer of `num_bytes` would exceed `max_answer_bytes`."""
    if num_bytes > limits.max_answer_bytes:
        raise TooLarge(
            f"the answer must have at most {limits.max_answer_bytes} bytes, got {num_bytes};"
            f" {remedy}",
            limit="max_answer_bytes",
        )


class PartedAnswer(StreamingResponse):
    """An answer of any length, written off the event loop in parts of at most 1 MiB.

    A part is written when the client has read the previous part, so one part is in memory.
    """

    def __init__(
        self,
        pieces: Iterator[bytes | memoryview],
        resources: Resources,
        answer_headers: dict[str, str],
        kind: str,
        *,
        held_bytes: int = 0,
    ) -> None:
        """pieces: at most 1 MiB each. held_bytes: bytes of the data behind the pieces that only
        this request keeps in memory.
        """
        super().__init__(_write_parts(pieces, resources), headers=answer_headers, media_type=kind)
        self._held_bytes = max(held_bytes, PART_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        announce_answer(scope, self._held_bytes)
        await super().__call__(scope, receive, send)


async def _write_parts(
    pieces: Iterator[bytes | memoryview], resources: Resources
) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    parts = _join_pieces(pieces)
    while (part := await loop.run_in_executor(resources.compute, next, parts, None)) is not None:
        yield part


def _join_pieces(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """Joins pieces to parts of at most 1 MiB; a longer piece is a part of its own."""
    part_pieces: list[bytes | memoryview] = []
    num_bytes = 0
    for piece in pieces:
        if part_pieces and num_bytes + len(piece) > PART_BYTES:
            yield b"".join(part_pieces)
            part_pieces, num_bytes = [], 0
        part_pieces.append(piece)
        num_bytes += len(piece)
    if part_pieces:
        yield b"".join(part_pieces)
