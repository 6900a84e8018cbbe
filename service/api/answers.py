"""Answers that carry arrays: contiguous float32 straight into the wire format."""

from typing import Any

import orjson
from starlette.responses import Response

from service.resources import Resources


def json_answer(content: Any, status: int = 200) -> Response:
    """JSON by orjson, which reads numpy arrays without making Python floats of them."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


def provenance(resources: Resources) -> dict[str, Any]:
    """What every answer says about the model behind it."""
    return {"model": resources.encoder.name, "fingerprint": resources.encoder.fingerprint}
