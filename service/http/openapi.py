"""The OpenAPI document: the input and statuses of every route, errors in the route's dialect."""

import re
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mlcd.service.http.auth import BEARER, HEADER, HEADER_NAME
from mlcd.service.http.dialect import Dialect, dialect_of
from mlcd.service.http.problems import RETRYABLE_STATUSES, TITLES
from mlcd.service.http.route_examples import example_of

_REFERENCE: Final = "#/components/schemas/{model}"
_BODY_STATUSES: Final = (400, 408, 413, 415, 422, 429, 503, 504)
_COMMON_STATUSES: Final = (400, 421, 500)
_KEYLESS_SERVER_STATUSES: Final = (403,)
_SCOPED_KEY_STATUSES: Final = (401, 403, 503)
_ANY_KEY_STATUSES: Final = (401, 503)
_METHODS: Final = ("get", "post", "put", "delete", "patch")
_FIRST_ERROR: Final = 400
_SENTENCE_END: Final = re.compile(r"(?<=\.)\s+")
# The order of tags on the page; the most used first.
_TAGS: Final = (
    "embed",
    "labels",
    "search",
    "collections",
    "jobs",
    "batches",
    "webhooks",
    "exploration",
    "openai",
    "cohere",
    "info",
    "kserve",
    "health",
)
BINARY: Final[dict[str, Any]] = {"schema": {"type": "string", "format": "binary"}}
_FORM: Final[dict[str, Any]] = {
    "schema": {
        "type": "object",
        "required": ["files"],
        "properties": {
            "files": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "string", "format": "binary"},
            }
        },
    }
}
_HEADERS: Final[dict[str, Any]] = {
    "X-Request-Id": {
        "description": "the request's id: the one that you sent, if it is valid",
        "schema": {"type": "string"},
    },
    "Server-Timing": {"description": "milliseconds, by stage", "schema": {"type": "string"}},
    "X-Mlcd-Model": {"description": "the served model", "schema": {"type": "string"}},
    "X-Mlcd-Fingerprint": {"description": "its fingerprint", "schema": {"type": "string"}},
    "X-Mlcd-Preprocess-Version": {
        "description": "the version of its preprocessing",
        "schema": {"type": "string"},
    },
    "X-Mlcd-Rounded": {
        "description": "the type that vectors are rounded to, if they are rounded",
        "schema": {"type": "string"},
    },
    "X-Mlcd-Centers": {
        "description": "the digest of the centers, if there are centers",
        "schema": {"type": "string"},
    },
}
_CHALLENGE: Final[dict[str, Any]] = {
    "WWW-Authenticate": {
        "description": "Bearer, and the reason why the key is refused",
        "schema": {"type": "string"},
    }
}
_KEY_IN_HEADER: Final = {
    "type": "apiKey",
    "in": "header",
    "name": HEADER_NAME,
    "description": "the same key",
}
_RETRY_AFTER: Final[dict[str, Any]] = {
    "Retry-After": {"description": "seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
}


def reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def json_body(model: type[BaseModel], **media_types: dict[str, Any]) -> dict[str, Any]:
    """Returns `openapi_extra` of a route that reads JSON.

    media_types: additional media types with their schemas.
    """
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": reference(model)}, **media_types},
        }
    }


def image_body(model: type[BaseModel] | None = None) -> dict[str, Any]:
    """Returns `openapi_extra` of a route that reads a form, a raw image and, with `model`, JSON."""
    content = {"multipart/form-data": _FORM, "image/*": BINARY, "application/octet-stream": BINARY}
    if model is not None:
        content["application/json"] = {"schema": reference(model)}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, *, keyed: bool, requests: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Returns the OpenAPI document of an application.

    keyed: whether routes require keys; the list of each scheme is the scope that a key needs.
    requests: models of bodies that routes refer to by `reference`.
    """
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own; no route uses them
        schemas.pop(unused, None)
    named_models: list[type[BaseModel]] = [
        *requests,
        *(dialect.schema for dialect in app.state.dialects),
    ]
    _, models = models_json_schema(
        [(model, "validation") for model in named_models], ref_template=_REFERENCE
    )
    schemas.update(models["$defs"])
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                _write_description(item[method], method, path)
                _declare_security(item[method], keyed=keyed)
                _add_responses(item[method], dialect_of(app, path), keyed=keyed)
    document["tags"] = [{"name": name} for name in _TAGS]
    document["paths"] = dict(sorted(document["paths"].items(), key=_rank))
    schemes = document["components"].pop("securitySchemes")
    if keyed:
        document["components"]["securitySchemes"] = {**schemes, HEADER: _KEY_IN_HEADER}
    return document


def _rank(named_item: tuple[str, dict[str, Any]]) -> int:
    """Returns the rank of a path on the page, which is the rank of its tag."""
    (operation, *_) = named_item[1].values()
    return _TAGS.index(operation["tags"][0])


def _write_description(operation: dict[str, Any], method: str, path: str) -> None:
    """Makes the first sentence of the description the summary, and adds an example."""
    summary, *description = _SENTENCE_END.split(operation["description"], maxsplit=1)
    operation["summary"] = " ".join(summary.split())
    if (example := example_of(method, path)) is not None:
        description.append(f"```\n{example}\n```")
    operation["description"] = "\n\n".join(description)


def _declare_security(operation: dict[str, Any], *, keyed: bool) -> None:
    """Declares that either header may contain the key; without keys, declares no header."""
    declared = operation.pop("security", None)
    if keyed and declared is not None:
        operation["security"] = [{scheme: declared[0][BEARER]} for scheme in (BEARER, HEADER)]


def _add_responses(operation: dict[str, Any], dialect: Dialect, *, keyed: bool) -> None:
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422", "")):
        del responses["422"]
    scopes = [scope for scheme in operation.get("security", [])[:1] for scope in scheme[BEARER]]
    statuses = [
        *_COMMON_STATUSES,
        *(
            (_SCOPED_KEY_STATUSES if scopes else _ANY_KEY_STATUSES)
            if "security" in operation
            else ()
        ),
        *(() if keyed else _KEYLESS_SERVER_STATUSES),
        *(_BODY_STATUSES if "requestBody" in operation else ()),
    ]
    for status in statuses:
        responses.setdefault(str(dialect.status(status)), {})
    for status, response in responses.items():
        response["headers"] = {**_HEADERS, **_select_headers(int(status))}
        if int(status) >= _FIRST_ERROR:
            response["description"] = TITLES[int(status)]
            response.setdefault(
                "content", {dialect.media_type: {"schema": reference(dialect.schema)}}
            )
    operation["responses"] = dict(sorted(responses.items()))


def _select_headers(status: int) -> dict[str, Any]:
    if status in RETRYABLE_STATUSES:
        return _RETRY_AFTER
    return _CHALLENGE if status in (401, 403) else {}
