import asyncio
import contextlib
import io
import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from PIL import Image

from mlcd.errors import ImageRejected, MlcdError, Overloaded, Unavailable
from mlcd.types import unit_rows
from tests.unit.service.cached import cached
from tests.unit.service.engines import (
    LocalEngine,
    new_admission,
    new_batcher,
    new_metrics,
    new_pipeline,
    sample,
)


class UnitEngine(LocalEngine):
    """Rows of unit norm, as every engine gives; `sick` gives NaN."""

    sick = False

    async def encode(self, batch):
        inference = await super().encode(batch)
        rows = unit_rows(inference.rows + np.array([1, 2, 3]))
        return replace(inference, rows=np.full_like(rows, np.nan) if self.sick else rows)


def png(value):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


@contextlib.asynccontextmanager
async def cached_pipeline(
    *, latency_s=0.0, max_batch=8, dtype="float32", memory_bytes=10**6, **options
):
    """Yields a pipeline behind a cache, its engine and its metrics."""
    engine, metrics = UnitEngine(latency_s), new_metrics()
    async with new_batcher(engine, metrics, max_batch=max_batch) as batcher:
        admission = new_admission(metrics, **options)
        pipeline = new_pipeline(engine, batcher, metrics, admission=admission)
        yield cached(pipeline, metrics, dtype=dtype, memory_bytes=memory_bytes), engine, metrics


def ask(pipe, *images):
    return asyncio.ensure_future(pipe.encode(images, deadline=math.inf))


def counted(metrics, tier, result="hit"):
    return sample(metrics, f'mlcd_cache_requests_total{{result="{result}",tier="{tier}"}}')


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_a_hit_has_the_bytes_of_the_miss_and_costs_no_inference(dtype):
    async with cached_pipeline(dtype=dtype, latency_s=0.01) as (pipe, engine, metrics):
        first, second = await ask(pipe, png(7), png(9)), await ask(pipe, png(9), png(7))
        assert second.embeddings.tobytes() == first.embeddings[::-1].tobytes()
        assert np.linalg.norm(first.embeddings.astype(np.float64), axis=1) == pytest.approx(
            1, abs=1e-6
        )
        assert first.rounded == second.rounded == (None if dtype == "float32" else dtype)
        exact = unit_rows(np.array([[8.0, 9, 10], [10, 11, 12]]))
        assert (first.embeddings.tobytes() == exact.tobytes()) == (dtype == "float32")
        assert sorted(chain(*engine.batches)) == [7, 9]  # decoded in either order
        assert first.timings.inference_s == engine.latency_s > 0 == second.timings.inference_s
        assert second.timings.server_timing().startswith("cache;dur=")
        assert (counted(metrics, "memory"), counted(metrics, "memory", "miss")) == (2, 2)


async def test_a_hit_needs_neither_engine_nor_room():
    async with cached_pipeline(latency_s=0.1, max_images=2) as (pipe, engine, _):
        known = await ask(pipe, png(1))
        busy = ask(pipe, png(2), png(3))
        await asyncio.sleep(0.01)
        assert (await ask(pipe, png(1))).embeddings.tobytes() == known.embeddings.tobytes()
        with pytest.raises(Overloaded):
            await ask(pipe, png(1), png(4))
        await busy
        engine.end()
        assert (await ask(pipe, png(1))).embeddings.tobytes() == known.embeddings.tobytes()
        with pytest.raises(Unavailable):
            await ask(pipe, png(1), png(4))


async def test_copies_in_one_request_are_computed_once_and_answered_each():
    async with cached_pipeline() as (pipe, engine, metrics):
        rejected = ImageRejected("unreadable", "no data-URI")
        given = [png(5), b"", png(5), b"", rejected, png(6), png(5)]
        encoded = await ask(pipe, *given)
        assert sorted(chain(*engine.batches)) == [5, 6]
        assert encoded.rows == [0, 2, 5, 6]
        assert len({encoded.embeddings[row].tobytes() for row in (0, 1, 3)}) == 1
        reasons = {index: error.reason for index, error in encoded.errors.items()}
        assert reasons == {1: "empty", 3: "empty", 4: "unreadable"}
        assert sample(metrics, 'mlcd_rejected_total{reason="empty"}') == 2
        assert sample(metrics, 'mlcd_rejected_total{reason="unreadable"}') == 1
        assert counted(metrics, "in_flight") == 3
        await ask(pipe, png(5), png(5))
        assert (counted(metrics, "memory"), counted(metrics, "memory", "miss")) == (2, 6)


async def test_one_of_several_requests_computes_and_none_waits_for_the_others_images():
    async with cached_pipeline(latency_s=0.03, max_batch=1) as (pipe, engine, metrics):
        large = ask(pipe, *[png(value) for value in range(8)])
        await asyncio.sleep(0.01)
        alone = await ask(pipe, png(0))
        assert not large.done()
        assert alone.embeddings.tobytes() == (await large).embeddings[0].tobytes()
        assert sorted(chain(*engine.batches)) == list(range(8))
        assert counted(metrics, "in_flight") == 1


@pytest.mark.parametrize("memory_bytes", [0, 10**6])
async def test_who_waits_for_a_request_that_is_gone_is_answered_all_the_same(memory_bytes):
    async with cached_pipeline(latency_s=0.05, memory_bytes=memory_bytes) as (
        pipe,
        engine,
        metrics,
    ):
        leader = ask(pipe, png(1))
        await asyncio.sleep(0.01)
        waiting = [ask(pipe, png(1)) for _ in range(3)]
        await asyncio.sleep(0.01)
        leader.cancel()
        found = {(await one).embeddings.tobytes() for one in waiting}
        assert found == {unit_rows(np.array([[2.0, 3, 4]])).tobytes()}
        assert len(engine.batches) <= 2  # what was at the engine already, and once more
        assert counted(metrics, "in_flight") == 2


async def test_a_failure_reaches_all_and_is_not_remembered():
    async with cached_pipeline(latency_s=0.01) as (pipe, engine, _):
        engine.failing = True
        outcomes = await asyncio.gather(
            *[ask(pipe, png(1)) for _ in range(3)], return_exceptions=True
        )
        assert all(isinstance(outcome, MlcdError) for outcome in outcomes)
        engine.failing = False
        assert (await ask(pipe, png(1))).rows == [0]


async def test_a_rejection_and_a_vector_that_is_none_are_not_remembered():
    async with cached_pipeline() as (pipe, engine, metrics):
        for num in (1, 2):
            assert (await ask(pipe, png(1)[:-30])).errors[0].reason == "undecodable"
            assert counted(metrics, "memory", "miss") == num
        engine.sick = True
        assert np.isnan((await ask(pipe, png(1))).embeddings).all()
        engine.sick = False
        assert np.isfinite((await ask(pipe, png(1))).embeddings).all()
        assert counted(metrics, "memory") == 0


async def test_large_bodies_are_hashed_off_the_event_loop():
    async with cached_pipeline() as (pipe, _, metrics):
        large = png(1) + bytes(2**20)  # what follows a PNG's end is ignored
        first = await ask(pipe, large, png(1))
        assert first.embeddings[0].tobytes() == first.embeddings[1].tobytes()
        await ask(pipe, large)
        assert counted(metrics, "memory") == 1
        assert counted(metrics, "in_flight") == 0
