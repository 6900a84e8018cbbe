"""Connections of fetches that end well, are given up at any moment, or find their host gone."""

import asyncio
import contextlib
from ipaddress import ip_network

import pytest

from mlcd.errors import ImageRejected
from mlcd.fetching.policy import FetchPolicy
from mlcd.fetching.url_client import UrlClient
from mlcd.fetching.urls import parse_url
from tests.image_host import ImageHost, ok


@contextlib.contextmanager
def receiving():
    yield lambda _: None


def policy(*hosts, **given):
    ports = tuple(host.port for host in hosts)
    networks = (ip_network("127.0.0.0/8"),)
    return FetchPolicy(("127.0.0.1", "127.0.0.2"), networks, ports, **given)


async def fetch(client, host):
    return await client.fetch(parse_url(host.url + "/"), receiving)


def test_a_fetch_that_is_given_up_at_any_moment_takes_no_place_with_it():
    with ImageHost({"/": ok(b"one")}) as one, ImageHost({"/": ok(b"two")}) as two:

        async def scenario():
            async with UrlClient(policy(one, two, max_connections=2)) as client:
                for steps in range(60):
                    for host in (one, two):
                        begun = asyncio.create_task(fetch(client, host))
                        for _ in range(steps):
                            await asyncio.sleep(0)
                        if steps % 2:
                            await asyncio.sleep(0.0005)
                        begun.cancel()
                        await asyncio.gather(begun, return_exceptions=True)
                async with asyncio.timeout(10):
                    return await asyncio.gather(*(fetch(client, host) for host in (one, two) * 4))

        assert asyncio.run(scenario()) == [b"one", b"two"] * 4


def test_a_connection_is_used_again_until_its_host_closes_it():
    peers = []

    def answer(connection):
        peers.append(connection.getpeername())
        connection.sendall(ok(b"x"))
        if len(peers) == 3:
            raise OSError("closes the connection")

    with ImageHost({"/": answer}) as host:

        async def scenario():
            async with UrlClient(policy(host)) as client:
                for _ in range(5):
                    assert await fetch(client, host) == b"x"
                    await asyncio.sleep(0.05)

        asyncio.run(scenario())
    assert len(set(peers[:3])) == len(set(peers[3:])) == 1
    assert len(set(peers)) == 2


def test_connections_that_nobody_needs_are_not_kept_without_bound():
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(ImageHost({"/": ok(b"x")})) for _ in range(6)]

        async def scenario():
            async with UrlClient(policy(*hosts, max_connections=2)) as client:
                for host in hosts:
                    assert await fetch(client, host) == b"x"
                return len(client.kept)

        assert asyncio.run(scenario()) == 2


def test_a_refused_connection_is_not_kept():
    with ImageHost({}) as host:
        gone = host.url
    with pytest.raises(ImageRejected) as raised:

        async def scenario():
            async with UrlClient(policy(host)) as client:
                await client.fetch(parse_url(gone + "/"), receiving)

        asyncio.run(scenario())
    assert raised.value.reason == "fetch-failed"
