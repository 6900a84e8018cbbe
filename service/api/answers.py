"""Answers that carry arrays: contiguous float32 straight into the wire format, and where they come from."""

import io
from typing import Any, Final

import numpy as np
import orjson
from fastapi import Request
from numpy.typing import NDArray
from starlette.responses import Response

from service.dispatch.pipeline import Encoded
from service.problems import NotAcceptable
from service.resources import Resources

JSON: Final = "application/json"
RAW: Final = "application/octet-stream"
NPY: Final = "application/x-npy"
ARROW: Final = "application/vnd.apache.arrow.stream"


def json_answer(content: Any, headers: dict[str, str] | None = None, *, status: int = 200) -> Response:
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
        **({} if encoded is None or encoded.rounded is None else {"X-Mlcd-Rounded": encoded.rounded}),
        **({} if encoded is None else {"Server-Timing": encoded.timings.server_timing()}),
    }


def negotiated(request: Request, offered: tuple[str, ...]) -> str:
    """The media type that the Accept header prefers; the first offered where it does not say.

    Raises NotAcceptable where it takes none of them.
    """
    best, highest = "", 0.0
    for part in request.headers.get("accept", "*/*").split(","):
        kind, weight = _accepted(part)
        found = next((offer for offer in offered if _matches(kind, offer)), "")
        if found and weight > highest:
            best, highest = found, weight
    if not best:
        raise NotAcceptable("this route cannot answer in that media type", remedy=f"accept one of {', '.join(offered)}")
    return best


def _accepted(part: str) -> tuple[str, float]:
    kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
    weights = [piece[2:] for piece in parameters if piece.startswith("q=")]
    try:
        return kind, float(weights[0]) if weights else 1.0
    except ValueError:
        return kind, 0.0


def _matches(kind: str, offer: str) -> bool:
    return kind in ("", "*/*", offer) or (kind.endswith("/*") and offer.startswith(kind[:-1]))
