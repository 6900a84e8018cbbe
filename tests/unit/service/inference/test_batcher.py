import asyncio
import time

import pytest

from mlcd.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.unit.service.engines import LocalEngine, new_batcher, new_metrics, picture, sample, until


async def test_each_waiter_gets_its_own_row():
    async with new_batcher(LocalEngine()) as batcher:
        rows = await asyncio.gather(*(batcher.encode(picture(i)) for i in range(50)))
        assert [row.embedding[0] for row in rows] == list(range(50))
        assert all(row.inference_s == 0.02 for row in rows)
        assert rows[-1].queue_s > rows[0].queue_s


async def test_images_that_come_together_ride_together_and_never_over_the_maximum():
    engine = LocalEngine()
    async with new_batcher(engine) as batcher:
        await asyncio.gather(*(batcher.encode(picture(i)) for i in range(2)))
        assert engine.batches == [[0, 1]]
        engine.batches.clear()
        await asyncio.gather(*(batcher.encode(picture(i)) for i in range(40)))
        assert [len(batch) for batch in engine.batches] == [8] * 5


async def test_a_full_batch_goes_ahead_and_a_partial_one_fills_until_the_engine_is_idle():
    engine = LocalEngine(latency_s=0.05)
    async with new_batcher(engine) as batcher:
        first = asyncio.ensure_future(batcher.encode(picture(0)))
        await until(lambda: engine.given == 1)
        rest = [asyncio.ensure_future(batcher.encode(picture(i))) for i in range(1, 4)]
        await asyncio.sleep(0.01)
        assert engine.given == 1  # three of eight: they wait for company
        rest += [asyncio.ensure_future(batcher.encode(picture(i))) for i in range(4, 30)]
        await until(lambda: engine.given == 2)
        await asyncio.gather(first, *rest)
        assert engine.most_given == 2
        assert [len(batch) for batch in engine.batches] == [1, 8, 8, 8, 5]


async def test_an_expected_image_is_waited_for_and_an_absent_one_is_not():
    engine = LocalEngine(latency_s=0.0)
    async with new_batcher(engine) as batcher:

        async def prepared_late():
            with batcher.expect_item():
                await asyncio.sleep(0.0005)
            return await batcher.encode(picture(2))

        await asyncio.gather(prepared_late(), batcher.encode(picture(1)))
        assert engine.batches == [[1, 2]]
        with batcher.expect_item():  # never comes: nobody waits for it longer than the delay
            started = time.perf_counter()
            await batcher.encode(picture(3))
            assert time.perf_counter() - started < 0.5


async def test_requests_take_turns():
    engine = LocalEngine()
    async with new_batcher(engine, max_batch=4) as batcher:
        first = asyncio.ensure_future(batcher.encode(picture(99)))
        await until(lambda: engine.given == 1)
        large = [
            asyncio.ensure_future(batcher.encode(picture(i), request="large")) for i in range(12)
        ]
        small = asyncio.ensure_future(batcher.encode(picture(50), request="small"))
        await asyncio.gather(first, small, *large)
        # What had gone ahead before the small one came stays ahead; then it has the next turn.
        assert engine.batches == [[99], [0, 50, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11]]


async def test_engine_failure_reaches_every_waiter_of_the_batch():
    engine = LocalEngine()
    async with new_batcher(engine) as batcher:
        engine.failing = True
        outcomes = await asyncio.gather(
            *(batcher.encode(picture(i)) for i in range(20)), return_exceptions=True
        )
        assert [type(outcome).__mro__[1] for outcome in outcomes] == [Unavailable] * 20
        engine.failing = False
        assert (await batcher.encode(picture(7))).embedding[0] == 7


async def test_what_is_queued_waits_for_the_next_engine_as_long_as_its_deadline_allows():
    engine, metrics = LocalEngine(), new_metrics()
    async with new_batcher(engine, metrics) as batcher:
        now = asyncio.get_running_loop().time()
        engine.end()
        patient = asyncio.ensure_future(batcher.encode(picture(1), deadline=now + 10))
        hasty = asyncio.ensure_future(batcher.encode(picture(2), deadline=now + 0.02))
        await asyncio.sleep(0.05)
        engine.start()
        assert (await patient).embedding[0] == 1
        with pytest.raises(DeadlineExceeded):
            await hasty
        assert engine.batches == [[1]]
        assert sample(metrics, 'mlcd_dropped_total{reason="deadline"}') == 1


async def test_refuses_when_full():
    async with new_batcher(LocalEngine(), max_queued=4) as batcher:
        waiting = [asyncio.ensure_future(batcher.encode(picture(i))) for i in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await batcher.encode(picture(9))
        assert len(await asyncio.gather(*waiting)) == 4


async def test_a_client_that_has_gone_is_dropped_before_inference():
    engine, metrics = LocalEngine(), new_metrics()
    async with new_batcher(engine, metrics) as batcher:
        first = asyncio.ensure_future(batcher.encode(picture(1)))
        await until(lambda: engine.given == 1)
        gone = asyncio.ensure_future(batcher.encode(picture(2)))
        kept = asyncio.ensure_future(batcher.encode(picture(3)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(first, kept)
        assert engine.batches == [[1], [3]]
        assert sample(metrics, 'mlcd_dropped_total{reason="client_gone"}') == 1


async def test_stopping_fails_those_who_still_wait():
    async with new_batcher(LocalEngine(latency_s=0.2), max_batch=1) as batcher:
        waiting = [asyncio.ensure_future(batcher.encode(picture(i))) for i in range(5)]
        await asyncio.sleep(0.05)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
