"""Answers that carry arrays, written from contiguous float32 straight into the wire format.

Large JSON answers are written result by result off the event loop, and never exist as a whole.
"""

import asyncio
import io
import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
from fastapi import Request
from numpy.typing import NDArray
from starlette.responses import Response, StreamingResponse

from service.errors import NotAcceptable
from service.inference.outcomes import Encoded
from service.resources import Resources

JSON: Final = "application/json"
RAW: Final = "application/octet-stream"
NPY: Final = "application/x-npy"
ARROW: Final = "application/vnd.apache.arrow.stream"
_REMEMBERED: Final = 256  # Accept headers whose answer is remembered
_REMEMBERED_CHARS: Final = 256  # the longest of them
_QUOTED: Final = re.compile(r'"(?:\\.?|[^"\\])*+"?')  # a parameter's value, which may hold commas
_WEIGHT: Final = re.compile(r"0?\.\d+|0\.?|1(?:\.0*)?")
# An answer with more entries or bytes is streamed; 2048 entries are written in about a millisecond.
_LARGE_ITEMS: Final = 2048
_LARGE_BYTES: Final = 2**20
_PIECE_NUMBERS: Final = 2**15  # written in about a millisecond
_TEXT_NUMBERS: Final = 64  # a row in base64 takes as long to write as so many numbers


def json_answer(
    content: Any, headers: dict[str, str] | None = None, *, status: int = 200
) -> Response:
    """Answers in JSON; orjson reads numpy arrays without making Python floats of them."""
    return Response(to_json(content), status, headers, media_type=JSON)


def to_json(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


async def json_list(values: NDArray[Any] | list[str], resources: Resources) -> Any:
    """Returns a list for `to_json`; a long one is written off the event loop, in pieces.

    The writer blocks all threads: between two pieces others run.
    """
    width = math.prod(values.shape[1:]) if isinstance(values, np.ndarray) else _TEXT_NUMBERS
    step = max(1, _PIECE_NUMBERS // max(1, width))
    if len(values) <= step:
        return values
    loop = asyncio.get_running_loop()
    pieces = [
        await loop.run_in_executor(resources.compute, to_json, values[start : start + step])
        for start in range(0, len(values), step)
    ]
    return orjson.Fragment(b"[" + b",".join(piece[1:-1] for piece in pieces) + b"]")


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
    """Returns the headers of an answer about the model, in every dialect and for binary answers.

    The middleware adds those of `Resources.stamp` to every answer. With `encoded` the stages are
    in Server-Timing, and X-Mlcd-Rounded says where an embedding was rounded.
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


def negotiated(request: Request, offered: tuple[str, ...]) -> str:
    """Returns the media type that the Accept header prefers (RFC 9110, 12.5.1).

    The weight of a type is that of the most specific range that covers it; 0 excludes the type.
    Among equal weights a type that is named goes before one that a wildcard covers, and then the
    first offered is taken. Raises NotAcceptable where the header accepts none of them.
    """
    accept = ",".join(request.headers.getlist("accept"))
    return (_chosen if len(accept) > _REMEMBERED_CHARS else _remembered)(accept, offered)


def _chosen(accept: str, offered: tuple[str, ...]) -> str:
    accept = _QUOTED.sub('""', accept)
    elements = [element for element in accept.split(",") if element.strip()]
    ranges = [_media_range(element) for element in elements or ["*/*"]]
    preferred = max(offered, key=partial(_preference, ranges))
    weight, _ = _preference(ranges, preferred)
    if weight == 0:
        raise NotAcceptable(
            "this route cannot answer in that media type",
            remedy=f"accept one of {', '.join(offered)}",
        )
    return preferred


_remembered = lru_cache(_REMEMBERED)(_chosen)


class _MediaRange(NamedTuple):
    """One element of an Accept header. has_parameters: it has parameters besides the weight."""

    kind: str
    has_parameters: bool
    weight: float

    def specificity(self, offer: str) -> int:
        """Returns how closely the range describes a media type; 0: it does not cover it.

        offer: a media type without parameters.
        """
        if self.kind == offer:
            return 3 if self.has_parameters else 4
        if self.kind == offer.partition("/")[0] + "/*":
            return 2
        return 1 if self.kind in ("*/*", "*") else 0


def _media_range(element: str) -> _MediaRange:
    kind, *parameters = (piece.strip().lower() for piece in element.split(";"))
    weights = [piece[2:] for piece in parameters if piece.startswith("q=")]
    if not all(map(_WEIGHT.fullmatch, weights)):
        # A range with an unreadable weight covers no media type.
        return _MediaRange("", has_parameters=False, weight=0.0)
    weight = float(weights[0]) if weights else 1.0
    return _MediaRange(kind, has_parameters=len(parameters) > len(weights), weight=weight)


def _preference(ranges: list[_MediaRange], offer: str) -> tuple[float, int]:
    """Returns the weight of a media type and the specificity of the range that gives it."""
    specificity, weight = max((one.specificity(offer), one.weight) for one in ranges)
    return (weight, specificity) if specificity else (0.0, 0)


def listed_answer(
    content: dict[str, Any],
    results: Sequence[Callable[[], Any]],
    stamp: dict[str, str],
    resources: Resources,
    *,
    num_items: int,
    num_bytes: int = 0,
    field: str = "results",
) -> Response:
    """Answers with `content` and, as its last field, `results`; each result is made when written.

    num_items, num_bytes: the approximate size of all results together. A small answer is sent in
    one piece. field: the name of the last field.
    """
    if num_items <= _LARGE_ITEMS and num_bytes <= _LARGE_BYTES:
        return json_answer({**content, field: [make() for make in results]}, stamp)
    written = _written({**content, field: []}, results, resources)
    return StreamingResponse(written, headers=stamp, media_type=JSON)


async def _written(
    content: dict[str, Any], results: Sequence[Callable[[], Any]], resources: Resources
) -> AsyncIterator[bytes]:
    """Writes `content`, whose last field is an empty list, with the results in the list."""
    loop = asyncio.get_running_loop()
    yield to_json(content)[: -len(b"]}")]
    for index, make in enumerate(results):
        yield await loop.run_in_executor(resources.compute, _piece, index, make)
    yield b"]}"


def _piece(index: int, make: Callable[[], Any]) -> bytes:
    return (b"," if index else b"") + to_json(make())
