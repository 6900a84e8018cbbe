"""A connection alone, on a loop of its own: what several requests on it are told of their client."""

import asyncio
import contextlib
import re
from functools import partial

import pytest
import uvicorn
from uvicorn.server import ServerState

from mlcd.service.http.connections import MAX_OVERHEAD_BYTES, ConnectionBounds, HttpConnection
from mlcd.service.http.presence import presence_of
from mlcd.service.telemetry.metrics import Metrics

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def client_of(app):
    """Yields a client's reader and writer, whose requests `app` answers."""
    metrics = Metrics(model="m", fingerprint="f", engine="e", precision="fp32", preprocess="1")
    bounds = ConnectionBounds(max_connections=10, exchange_s=20, metrics=metrics)
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    protocol = partial(
        HttpConnection, bounds=bounds, config=config, server_state=ServerState(), app_state={}
    )
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield reader, writer
        writer.close()


@pytest.mark.parametrize("num", [1, 2, 3])
async def test_the_request_under_way_learns_that_its_client_left_whatever_came_after_it(num):
    heard, began, ended = [], asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        presence_of(scope).watch(lambda: heard.append("watch"))
        began.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        heard.append("message")
        ended.set()

    async with client_of(app) as (_, writer):
        writer.write(num * GET)
        await began.wait()
        writer.close()
        await asyncio.wait_for(ended.wait(), 10)
    assert heard == ["watch", "message"]


async def test_requests_that_were_answered_are_told_nothing():
    heard = []

    async def app(scope, receive, send):
        presence_of(scope).watch(lambda: heard.append("left"))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with client_of(app) as (reader, writer):
        writer.write(2 * GET)
        for _ in range(2):
            assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await asyncio.sleep(0.1)
    assert heard == []


async def test_too_much_on_a_connection_that_is_closing_is_no_fault_of_the_server(caplog):
    async def app(scope, receive, send):
        headers = [(b"connection", b"close"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body"})

    async with client_of(app) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b" 400 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"1;" + 2 * MAX_OVERHEAD_BYTES * b"x")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    assert not caplog.records


@pytest.mark.parametrize("pause_s", [0.0, 0.6])
@pytest.mark.parametrize("num", [1, 3])
async def test_a_client_that_has_ended_its_side_is_answered_and_the_connection_closed(pause_s, num):
    """`nc -N` does so; an answer that takes long comes after a 100 that asks whether it is there."""
    left = []

    async def app(scope, receive, send):
        presence_of(scope).watch(lambda: left.append("left"))
        await asyncio.sleep(pause_s)
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        presence_of(scope).forget()
        await send({"type": "http.response.body", "body": b"ok"})

    async with client_of(app) as (reader, writer):
        writer.write(num * GET)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 10)
    statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
    assert [status for status in statuses if status != b"100"] == num * [b"200"]
    assert (b"100" in statuses) == (pause_s > 0)
    assert answer.endswith(b"ok")
    assert left == []


async def test_a_client_that_has_left_is_noticed_though_it_looks_as_if_it_only_ended_its_side():
    left = asyncio.Event()

    async def app(scope, receive, send):
        presence_of(scope).watch(left.set)
        await asyncio.sleep(20)

    async with client_of(app) as (_, writer):
        writer.write(GET)
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.wait_for(left.wait(), 2)


@pytest.mark.parametrize(
    "sent", [b"", GET[:-2], b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx"]
)
async def test_a_client_that_ends_its_side_before_its_request_is_let_go(sent):
    async def app(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    async with client_of(app) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 2) == b""
