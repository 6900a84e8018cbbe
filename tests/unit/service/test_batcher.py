import asyncio
import threading
import time

import numpy as np
import pytest

from mlcd.errors import Overloaded, Unavailable
from mlcd.images.transform import PreprocessSpec
from service.dispatch.batcher import MicroBatcher
from service.observability.metrics import Metrics


class FakeEncoder:
    """The `Encoder` protocol with a fixed latency and a switch to fail."""

    name, fingerprint, dimension, engine, precision = "fake", "f" * 64, 3, "fake", "fp32"
    preprocess = PreprocessSpec(4, 4)

    def __init__(self, latency_s=0.02):
        self.latency_s, self.failing, self.batches = latency_s, False, []
        self.lock = threading.Lock()

    def encode(self, images):
        assert self.lock.acquire(blocking=False), "two inferences at once"
        try:
            time.sleep(self.latency_s)
            if self.failing:
                raise RuntimeError("engine text that must not get out")
            self.batches.append(len(images))
            return images[:, :, 0, 0].astype(np.float32)
        finally:
            self.lock.release()

    def close(self): ...


def image(value):
    return np.full((3, 4, 4), value, np.uint8)


def batcher(encoder, **options):
    metrics = Metrics(model="fake", fingerprint="f", engine="fake", precision="fp32")
    return MicroBatcher(encoder, **({"max_batch": 8, "max_queued": 100} | options), metrics=metrics)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_each_waiter_gets_its_own_row():
    async def scenario():
        async with batcher(FakeEncoder()) as running:
            rows = await asyncio.gather(*(running.encode(image(i)) for i in range(50)))
            assert [row[0] for row in rows] == list(range(50))

    run(scenario())


def test_images_that_come_together_ride_together_and_never_over_the_maximum():
    encoder = FakeEncoder()

    async def scenario():
        async with batcher(encoder) as running:
            encoder.batches.clear()
            await asyncio.gather(*(running.encode(image(i)) for i in range(2)))
            assert encoder.batches == [2]
            encoder.batches.clear()
            await asyncio.gather(*(running.encode(image(i)) for i in range(40)))
            assert max(encoder.batches) == 8
            assert len(encoder.batches) <= 6

    run(scenario())


def test_an_announced_image_is_waited_for_and_an_absent_one_is_not():
    encoder = FakeEncoder(latency_s=0.0)

    async def scenario():
        async with batcher(encoder) as running:
            encoder.batches.clear()

            async def prepared_late():
                with running.announced():
                    await asyncio.sleep(0.0005)
                return await running.encode(image(2))

            await asyncio.gather(prepared_late(), running.encode(image(1)))
            assert encoder.batches == [2]
            with running.announced():  # never comes: nobody waits for it longer than the delay
                started = time.perf_counter()
                await running.encode(image(3))
                assert time.perf_counter() - started < 0.5

    run(scenario())


def test_a_lone_image_does_not_wait_for_company():
    async def scenario():
        async with batcher(FakeEncoder(latency_s=0.0)) as running:
            started = time.perf_counter()
            await running.encode(image(1))
            assert time.perf_counter() - started < 0.5

    run(scenario())


def test_engine_failure_reaches_every_waiter_and_says_nothing_of_the_engine():
    encoder = FakeEncoder()

    async def scenario():
        async with batcher(encoder) as running:
            assert running.healthy
            encoder.failing = True
            outcomes = await asyncio.gather(*(running.encode(image(i)) for i in range(20)), return_exceptions=True)
            assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
            assert "engine text" not in str(outcomes[0])
            assert not running.healthy
            assert not await running.probe()
            encoder.failing = False
            assert await running.probe()
            assert (await running.encode(image(7)))[0] == 7
            assert running.healthy

    run(scenario())


def test_refuses_when_full():
    async def scenario():
        async with batcher(FakeEncoder(), max_queued=4) as running:
            waiting = [asyncio.ensure_future(running.encode(image(i))) for i in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await running.encode(image(9))
            assert len(await asyncio.gather(*waiting)) == 4

    run(scenario())


def test_a_client_that_has_gone_is_dropped_before_inference():
    encoder = FakeEncoder()

    async def scenario():
        async with batcher(encoder) as running:
            encoder.batches.clear()
            first = asyncio.ensure_future(running.encode(image(1)))
            await asyncio.sleep(0.005)  # the engine is busy with the first
            gone = asyncio.ensure_future(running.encode(image(2)))
            kept = asyncio.ensure_future(running.encode(image(3)))
            await asyncio.sleep(0)
            gone.cancel()
            assert (await first)[0] == 1
            assert (await kept)[0] == 3
            assert encoder.batches == [1, 1]

    run(scenario())


def test_stopping_fails_those_who_still_wait():
    async def scenario():
        running = batcher(FakeEncoder(latency_s=0.2), max_batch=1)
        async with running:
            waiting = [asyncio.ensure_future(running.encode(image(i))) for i in range(5)]
            await asyncio.sleep(0.05)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)

    run(scenario())
