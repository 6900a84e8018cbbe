"""Answers that carry arrays: contiguous float32 straight into the wire format, and where they come from.

Large JSON answers are written piece by piece off the event loop: none of them exists as a whole.
"""

import asyncio
import io
import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
from fastapi import Request
from numpy.typing import NDArray
from starlette.responses import Response, StreamingResponse

from service.errors import NotAcceptable
from service.inference.pipeline import Encoded
from service.resources import Resources

JSON: Final = "application/json"
RAW: Final = "application/octet-stream"
NPY: Final = "application/x-npy"
ARROW: Final = "application/vnd.apache.arrow.stream"
_QUOTED: Final = re.compile(r'"(?:\\.?|[^"\\])*+"?')  # a parameter's value, which may hold commas
_WEIGHT: Final = re.compile(r"0?\.\d+|0\.?|1(?:\.0*)?")
_LARGE_ITEMS: Final = 2048  # entries of an answer: so many are written in about a millisecond
_LARGE_BYTES: Final = 2**20


def json_answer(
    content: Any, headers: dict[str, str] | None = None, *, status: int = 200
) -> Response:
    """JSON by orjson, which reads numpy arrays without making Python floats of them."""
    return Response(to_json(content), status, headers, media_type=JSON)


def to_json(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def to_npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def provenance(resources: Resources) -> dict[str, Any]:
    """What every answer of ours says about the model behind it."""
    return {
        "model": resources.encoder.name,
        "fingerprint": resources.encoder.fingerprint,
        "preprocess_version": resources.encoder.preprocess.version,
    }


def headers(resources: Resources, encoded: Encoded | None = None) -> dict[str, str]:
    """The same for every dialect and for binary answers, beside those of `Resources.stamp`, which every answer has.

    With `encoded`, its stages as Server-Timing.
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

    A type weighs what the most specific range that holds it says, and 0 excludes it. Of equals the
    one that is named goes before one that a wildcard covers, then the first offered is taken.
    Raises NotAcceptable where the header takes none of them.
    """
    accept = _QUOTED.sub('""', ",".join(request.headers.getlist("accept")))
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


class _MediaRange(NamedTuple):
    """One element of an Accept header. has_parameters: others than the weight."""

    kind: str
    has_parameters: bool
    weight: float

    def specificity(self, offer: str) -> int:
        """Returns how closely it describes a media type without parameters; 0: it does not hold it."""
        if self.kind == offer:
            return 3 if self.has_parameters else 4
        if self.kind == offer.partition("/")[0] + "/*":
            return 2
        return 1 if self.kind in ("*/*", "*") else 0


def _media_range(element: str) -> _MediaRange:
    kind, *parameters = (piece.strip().lower() for piece in element.split(";"))
    weights = [piece[2:] for piece in parameters if piece.startswith("q=")]
    if not all(map(_WEIGHT.fullmatch, weights)):
        return _MediaRange(
            "", has_parameters=False, weight=0.0
        )  # it holds nothing: its weight cannot be known
    weight = float(weights[0]) if weights else 1.0
    return _MediaRange(kind, has_parameters=len(parameters) > len(weights), weight=weight)


def _preference(ranges: list[_MediaRange], offer: str) -> tuple[float, int]:
    """Returns the weight of a media type and the specificity of the range that says so."""
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
) -> Response:
    """Returns `content` with the field `results` last, each of them made when it is written.

    num_items, num_bytes: about how much there is in all results together; a small answer goes out
    in one piece.
    """
    if num_items <= _LARGE_ITEMS and num_bytes <= _LARGE_BYTES:
        return json_answer({**content, "results": [make() for make in results]}, stamp)
    return StreamingResponse(_written(content, results, resources), headers=stamp, media_type=JSON)


async def _written(
    content: dict[str, Any], results: Sequence[Callable[[], Any]], resources: Resources
) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    yield to_json({**content, "results": []})[: -len(b"]}")]
    for index, make in enumerate(results):
        yield await loop.run_in_executor(resources.compute, _piece, index, make)
    yield b"]}"


def _piece(index: int, make: Callable[[], Any]) -> bytes:
    return (b"," if index else b"") + to_json(make())
