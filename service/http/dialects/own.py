"""The dialect of our own routes: refusals by RFC 9457."""

from typing import Any, Final

from mlcd.service.http.dialect import Dialect, Refusal
from mlcd.wire.shapes import Problem

_PREFIX: Final = "urn:mlcd:problem:"


def _render_refusal(refusal: Refusal) -> dict[str, Any]:
    extra = {"limit": refusal.limit, "index": refusal.index, "param": refusal.param}
    return {
        "type": _PREFIX + refusal.name,
        "title": refusal.title,
        "status": refusal.status,
        "detail": refusal.detail,
        "instance": refusal.instance,
        "request_id": refusal.request_id,
        **{name: value for name, value in extra.items() if value is not None},
    }


# The empty prefix covers every path that no other dialect covers.
DIALECT: Final = Dialect(("",), "application/problem+json", Problem, _render_refusal)
