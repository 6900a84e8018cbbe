"""The fast path: which requests take it, and that it requires a key like FastAPI's path."""

import asyncio
from types import SimpleNamespace

from fastapi import FastAPI, Request
from starlette.responses import Response

from mlcd.service.errors import Unauthorized
from mlcd.service.http.app import create_app
from mlcd.service.http.auth import needs
from mlcd.service.http.fast_path import FastPathMiddleware

FAST = {("POST", "/v1/images/embed"), ("POST", "/v1/labels"), ("POST", "/v1/classify")}
SLOW = {("POST", "/v1/embeddings"), ("GET", "/v1/info"), ("POST", "/v2/embed")}


def app_of(keys=None):
    app = FastAPI()
    app.state.resources = SimpleNamespace(keys=keys)

    @app.post("/plain", dependencies=[needs("embed")])
    async def plain(request: Request, resources: object, top: int = 8) -> Response:
        return Response(f"{top} of {resources.name} for {request.url.path}")

    return app


def answer_of(app, query=b""):
    """Returns the answer of the fast path, or "slow"."""
    sent = []

    async def slow(scope, receive, send):
        sent.append({"body": b"slow"})

    async def send(message):
        sent.append(message)

    route = {"method": "POST", "path": "/plain", "query_string": query, "headers": []}
    state = {"resources": SimpleNamespace(name="this")}
    scope = {"type": "http", "app": app, "state": state, "server": ("here", 80), **route}
    asyncio.run(FastPathMiddleware(slow, routes=app.routes)(scope, None, send))
    return sent[-1]["body"]


def test_plain_routes_take_it_and_those_that_fastapi_validates_do_not():
    found = FastPathMiddleware(None, routes=create_app(None).state.routes)._routes
    assert found.keys() >= FAST
    assert not found.keys() & SLOW
    assert not any("{" in path for _, path in found)


def test_the_function_is_called_with_its_defaults_and_a_query_goes_to_fastapi():
    assert answer_of(app_of()) == b"8 of this for /plain"
    assert answer_of(app_of(), b"top=3") == b"slow"


def test_the_key_is_asked_for():
    class Nobody:
        def identify(self, shown):
            raise Unauthorized("no key", remedy="show one")

    app = app_of(Nobody())
    app.state.dialects = create_app(None).state.dialects
    assert b'"status":401' in answer_of(app)
