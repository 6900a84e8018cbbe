"""Every route is within the budget of answers, and every answer leaves it when it has been read."""

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.routing import APIRoute
from starlette.responses import Response, StreamingResponse

from mlcd.service.http.answer_budget import PART_BYTES, AnswerMiddleware, announce_answer
from mlcd.service.http.app import create_app
from mlcd.service.http.json_route import JsonRoute
from mlcd.service.settings import Files, Limits
from tests.unit.service.engines import new_admission, new_metrics, sample, until

ROUTES = Path(__file__).parents[4] / "service" / "http"
MIB = 2**20
DIALECTS = create_app(None).state.dialects
SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}, "http_version": "1.1", "scheme": "http"}
SCOPE |= {"root_path": "", "query_string": b"", "headers": [(b"host", b"localhost")]}
SCOPE |= {"server": ("localhost", 80), "client": ("localhost", 1)}


async def no_headers(*_):
    return []


def new_resources(most=10 * MIB, *, keys=None):
    metrics = new_metrics()
    return SimpleNamespace(
        admission=new_admission(metrics, answers=most),
        settings=SimpleNamespace(
            limits=Limits(),
            files=Files(),
            hosts=(),
            auth=SimpleNamespace(keys_file="k", mode="keys"),
        ),
        metrics=metrics,
        keys=keys,
        rate_limiter=SimpleNamespace(headers=no_headers),
        tracer=None,
        texts=None,
        stamp=(),
        retry_after_s=1,
        further=SimpleNamespace(names=[]),
        model=SimpleNamespace(requests=SimpleNamespace(begin=int, end=int)),
    )


@dataclass
class Client:
    """A client that reads so many messages of its answer, and waits then; it sends one request."""

    app: object
    path: str
    method: str = "GET"
    resources: object = None
    reads: float = float("inf")
    messages: list = field(default_factory=list)
    longest: int = 0
    state: dict = field(default_factory=dict)

    async def ask(self):
        scope = SCOPE | {"method": self.method, "path": self.path, "raw_path": self.path.encode()}
        scope["app"] = SimpleNamespace(state=SimpleNamespace(dialects=DIALECTS))
        scope["state"] = {"resources": self.resources, "deadline": 1e9, "key": None} | self.state
        await self.app(scope, self._receive, self._send)

    async def _receive(self):
        while not self.is_complete:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def _send(self, message):
        # As uvicorn: the message before has to be read before the next is taken.
        while len(self.messages) >= self.reads:  # noqa: ASYNC110 - as a slow client
            await asyncio.sleep(0.001)
        self.messages.append(message)
        self.longest = max(self.longest, len(message.get("body", b"")))

    @property
    def is_complete(self):
        last = self.messages[-1] if self.messages else {"type": ""}
        return last["type"] == "http.response.body" and not last.get("more_body", False)

    @property
    def status(self):
        return self.messages[0]["status"]

    @property
    def body(self):
        return b"".join(bytes(message.get("body", b"")) for message in self.messages)


def fill(path):
    return re.sub(r"{[^}]*}", "x", path)


async def big(*_, **__):
    return Response(b"x" * 2 * MIB)


async def test_every_route_of_the_application_is_refused_where_there_is_no_room_for_its_answer(
    monkeypatch,
):
    """Whatever a route answers with, old or to come: here all of them with two mebibytes."""
    for kind in (APIRoute, JsonRoute):
        monkeypatch.setattr(kind, "get_route_handler", lambda _: big)
    resources = new_resources(MIB)
    app = create_app(resources)
    app.middleware_stack = app.build_middleware_stack()  # the fast path collects its routes here
    asked = []

    for route in app.state.routes:
        monkeypatch.setattr(route, "endpoint", big)
    for route in app.state.routes:
        for method in sorted((route.methods or {"GET"}) - {"HEAD", "OPTIONS"}):
            client = Client(app, fill(route.path), method)
            await client.ask()
            asked.append((method, route.path))
            assert client.status == 429, (method, route.path, client.body[:100])
            assert b"retry-after" in dict(client.messages[0]["headers"])
            assert len(client.body) < 1000
    declared = {
        (method, route.path)
        for route in app.state.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert declared <= set(asked)
    assert len(declared) > 40


def test_only_two_modules_make_streams_of_their_own():
    """The parts of all other long answers are made off the event loop, one at a time."""
    makers = {
        path.relative_to(ROUTES).as_posix()
        for path in ROUTES.rglob("*.py")
        if "StreamingResponse" in path.read_text()
    }
    assert makers == {"answers.py", "routes/jobs.py"}


def held(resources):
    return sample(resources.metrics, 'mlcd_held{of="answers"}')


def behind_the_budget(answer, resources, **client):
    return Client(AnswerMiddleware(answer), "/", resources=resources, **client)


async def test_an_answer_goes_out_in_parts_and_holds_its_place_until_it_is_read():
    resources = new_resources()
    client = behind_the_budget(Response(b"x" * 5 * MIB), resources, reads=3)
    asking = asyncio.create_task(client.ask())
    await until(lambda: len(client.messages) == 3)
    assert held(resources) == 5 * MIB
    client.reads = 100
    await asking
    assert held(resources) == 0
    assert (len(client.body), client.longest) == (5 * MIB, PART_BYTES)
    assert [message.get("more_body") for message in client.messages[-2:]] == [True, False]


async def test_a_small_answer_is_one_message_and_needs_no_room():
    client = behind_the_budget(Response(b"live"), new_resources(0))
    await client.ask()
    expected = ["http.response.start", "http.response.body"]
    assert [message["type"] for message in client.messages] == expected


async def test_a_client_that_leaves_gives_its_place_back():
    resources = new_resources()
    client = behind_the_budget(Response(b"x" * 5 * MIB), resources, reads=2)
    asking = asyncio.create_task(client.ask())
    await until(lambda: len(client.messages) == 2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert held(resources) == 0


@pytest.mark.parametrize("announced", [0, 3 * MIB])
async def test_a_stream_holds_its_largest_part_or_what_it_announced(announced):
    made = []

    async def parts():
        for num in (10, MIB // 2, 2 * MIB, MIB):
            made.append(num)
            yield b"x" * num

    async def streaming(scope, receive, send):
        if announced:
            announce_answer(scope, announced)
        await StreamingResponse(parts())(scope, receive, send)

    resources = new_resources()
    client = behind_the_budget(streaming, resources, reads=2)
    asking = asyncio.create_task(client.ask())
    reserved = []
    for reads in range(2, 12):
        client.reads = reads
        await asyncio.sleep(0.02)
        reserved.append(held(resources))
        if asking.done():
            break
    assert max(reserved) == max(announced, 2 * MIB)
    client.reads = 100
    await asking
    assert made == [10, MIB // 2, 2 * MIB, MIB]
    assert len(client.body) == 10 + MIB // 2 + 3 * MIB
    assert client.longest == PART_BYTES
    assert held(resources) == 0


async def test_a_stream_that_has_begun_waits_for_room():
    async def parts():
        yield b"x"
        yield b"x" * 2 * MIB

    resources = new_resources(3 * MIB)
    answers = resources.admission.answers
    answers.reserve(2 * MIB, owner=None)
    client = behind_the_budget(StreamingResponse(parts()), resources)
    asking = asyncio.create_task(client.ask())
    await asyncio.sleep(0.1)
    assert (asking.done(), len(client.body)) == (False, 1)
    answers.release(2 * MIB, owner=None)
    await asking
    assert len(client.body) == 1 + 2 * MIB


async def test_a_refused_stream_is_not_made():
    made = []

    async def parts():
        for _ in range(1000):
            made.append(MIB)
            yield b"x" * MIB
            await asyncio.sleep(0.001)

    client = behind_the_budget(StreamingResponse(parts()), new_resources(MIB // 2))
    await asyncio.wait_for(client.ask(), 5)
    assert (client.status, len(made) < 10) == (429, True)


async def test_an_answer_that_no_client_may_ask_for_is_refused_whatever_is_free():
    resources = new_resources(1000 * MIB)
    resources.settings.limits = Limits(max_answer_bytes=MIB)
    client = behind_the_budget(Response(b"x" * 2 * MIB), resources)
    await client.ask()
    assert (client.status, json.loads(client.body)["limit"]) == (413, "max_answer_bytes")


async def test_a_key_leaves_room_for_others():
    resources = new_resources(10 * MIB)
    resources.admission.answers._min_per_owner = MIB
    greedy = {"key": SimpleNamespace(id="greedy")}
    other = {"key": SimpleNamespace(id="other")}
    unread = [
        behind_the_budget(Response(b"x" * 2 * MIB), resources, reads=2, state=greedy)
        for _ in range(4)
    ]
    tasks = [asyncio.create_task(client.ask()) for client in unread]
    await until(lambda: all(client.messages for client in unread))
    assert [client.status for client in unread] == [200, 200, 429, 429]
    client = behind_the_budget(Response(b"x" * 2 * MIB), resources, state=other)
    await client.ask()
    assert client.status == 200
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
