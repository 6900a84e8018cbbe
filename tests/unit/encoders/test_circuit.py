import asyncio
import time

import pytest

from mlcd.encoders import circuit
from mlcd.encoders.circuit import Circuit
from mlcd.errors import ArtifactInvalid, Unavailable


class Server:
    def __init__(self):
        self.fault = None
        self.checks = []

    async def check(self, suspected):
        self.checks.append(suspected)
        if self.fault is not None:
            raise self.fault


async def forever():
    await asyncio.sleep(60)


async def until(condition):
    while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
        await asyncio.sleep(0.01)


async def value():
    return 7


async def ask(breaker, question):
    breaker.require()
    return await breaker.call(question())


def run(story):
    async def whole():
        server = Server()
        breaker = Circuit(server.check)
        breaker.start()
        try:
            await asyncio.wait_for(story(server, breaker), 10)
        finally:
            await breaker.close("closed")

    asyncio.run(whole())


def test_an_open_circuit_ends_calls_refuses_new_ones_and_closes_by_itself():
    async def story(server, breaker):
        assert await ask(breaker, value) == 7
        waiting = asyncio.create_task(ask(breaker, forever))
        await asyncio.sleep(0)
        server.fault = ArtifactInvalid("it burns", remedy="water")
        started = time.perf_counter()
        with pytest.raises(Unavailable, match="it burns: water"):
            await waiting
        assert time.perf_counter() - started < 5
        started = time.perf_counter()
        for _ in range(100):
            with pytest.raises(Unavailable, match="it burns"):
                await ask(breaker, value)
        assert time.perf_counter() - started < 1
        server.fault = None
        await until(lambda: breaker.fault is None)
        assert await ask(breaker, value) == 7
        assert breaker.num_in_flight == 0

    run(story)


def test_a_caller_cancelled_while_the_circuit_opens_stays_cancelled():
    async def story(server, breaker):
        waiting = asyncio.create_task(ask(breaker, forever))
        await asyncio.sleep(0)
        waiting.cancel()
        await breaker.close("closed")
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(story)


def test_a_caller_goes_on_after_its_call_was_ended():
    async def story(server, breaker):
        async def caller():
            try:
                await ask(breaker, forever)
            except Unavailable:
                await asyncio.sleep(0.01)  # would raise, were the cancellation not taken back
                return "went on"

        waiting = asyncio.create_task(caller())
        await asyncio.sleep(0)
        server.fault = Unavailable("down")
        assert await waiting == "went on"
        assert waiting.cancelling() == 0

    run(story)


def test_a_suspicion_is_looked_into_at_once(monkeypatch):
    monkeypatch.setattr(circuit, "_INTERVAL_S", 30)

    async def story(server, breaker):
        await asyncio.sleep(0.05)
        assert server.checks == []
        breaker.suspect()
        await until(lambda: server.checks)
        assert server.checks == [True]

    run(story)


def test_a_callers_cancellation_is_its_own():
    async def story(server, breaker):
        waiting = asyncio.create_task(ask(breaker, forever))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert breaker.num_in_flight == 0

    run(story)


def test_without_a_watcher_nothing_is_up(caplog):
    async def story(server, breaker):
        server.fault = ValueError("a bug of ours")
        await until(lambda: breaker.fault)
        with pytest.raises(Unavailable, match="watcher of the server failed"):
            await ask(breaker, value)

    run(story)
    assert "the watcher of a circuit failed" in caplog.text
