import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlcd.errors import DeadlineExceeded, ImageRejected, Overloaded
from mlcd.images.decode import DecodeLimits
from service.dispatch.pipeline import Pipeline
from service.middleware import within_deadline
from service.observability.metrics import Metrics
from tests.unit.service.test_batcher import FakeEncoder, batcher, run


def pipeline(running, encoder, **options):
    metrics = Metrics(model="fake", fingerprint="f", engine="fake", precision="fp32")
    settings = {"max_admitted": 4, "limits": DecodeLimits()} | options
    pool = ThreadPoolExecutor(2)
    return Pipeline(running, pool, preprocess=encoder.preprocess, dimension=3, metrics=metrics, **settings)


def test_a_request_over_the_admission_limit_is_refused_and_the_place_is_given_back(photo):
    encoder = FakeEncoder(latency_s=0.05)

    async def scenario():
        async with batcher(encoder) as running:
            pipe = pipeline(running, encoder)
            first = asyncio.ensure_future(pipe.encode([photo] * 3))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await pipe.encode([photo] * 2)
            assert len((await first).rows) == 3
            assert len((await pipe.encode([photo] * 4)).rows) == 4

    run(scenario())


def test_a_bad_image_fails_alone(photo):
    encoder = FakeEncoder()

    async def scenario():
        async with batcher(encoder) as running:
            given = [b"", photo, ImageRejected("unreadable", "no data-URI")]
            encoded = await pipeline(running, encoder).encode(given)
            assert encoded.rows == [1]
            assert {index: error.reason for index, error in encoded.errors.items()} == {0: "empty", 2: "unreadable"}

    run(scenario())


def test_the_deadline_cancels_the_work():
    async def scenario():
        gone = asyncio.Event()

        async def slow():
            try:
                await asyncio.sleep(10)
            finally:
                gone.set()

        with pytest.raises(DeadlineExceeded):
            await within_deadline(slow(), 0.02)
        assert gone.is_set()

    run(scenario())
