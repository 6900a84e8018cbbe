import asyncio
import io
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from mlcd.errors import DeadlineExceeded, ImageRejected, Overloaded, Unavailable
from mlcd.service.deadline import within_deadline
from mlcd.service.errors import RateExceeded, TooLarge
from tests.unit.service.engines import (
    LocalEngine,
    new_admission,
    new_batcher,
    new_metrics,
    new_pipeline,
    sample,
)


async def test_a_request_over_the_admission_limit_is_refused_and_the_place_is_given_back(photo):
    engine = LocalEngine(latency_s=0.05)
    async with new_batcher(engine) as batcher:
        pipe = new_pipeline(engine, batcher, admission=new_admission(max_images=4))
        first = asyncio.ensure_future(pipe.encode([photo] * 3, deadline=math.inf))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await pipe.encode([photo] * 2, deadline=math.inf)
        assert len((await first).rows) == 3
        assert len((await pipe.encode([photo] * 4, deadline=math.inf)).rows) == 4


async def test_pixels_are_counted_before_anything_is_decoded(photo):
    engine, metrics = LocalEngine(latency_s=0.2), new_metrics()
    async with new_batcher(engine) as batcher:
        photo_pixels = 640 * 427
        admission = new_admission(pixels=3 * photo_pixels)
        pipe = new_pipeline(
            engine, batcher, metrics, admission=admission, max_pixels=3 * photo_pixels
        )
        first = asyncio.ensure_future(pipe.encode([photo] * 2, deadline=math.inf))
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded, match="pixels"):
            await pipe.encode([photo] * 2, deadline=math.inf)
        assert len((await pipe.encode([photo], deadline=math.inf)).rows) == 1
        await first
        with pytest.raises(TooLarge, match="a request must have at most"):
            await pipe.encode([photo] * 4, deadline=math.inf)
        assert sample(metrics, 'mlcd_decode_duration_seconds_count{format="JPEG"}') == 3


async def test_a_bad_image_fails_alone_and_the_stages_are_timed(photo):
    engine = LocalEngine()
    async with new_batcher(engine) as batcher:
        given = [b"", photo, ImageRejected("unreadable", "no data-URI"), photo[:5000]]
        encoded = await new_pipeline(engine, batcher).encode(given, deadline=math.inf)
        assert encoded.rows == [1]
        reasons = {index: error.reason for index, error in encoded.errors.items()}
        assert reasons == {0: "empty", 2: "unreadable", 3: "undecodable"}
        assert encoded.timings.inference_s == 0.02
        assert encoded.timings.decode_s > 0
        assert "inference;dur=20.0" in encoded.timings.server_timing()


async def test_refused_at_once_while_the_engine_is_down_or_the_deadline_is_past(photo):
    engine = LocalEngine()
    async with new_batcher(engine) as batcher:
        pipe = new_pipeline(engine, batcher)
        with pytest.raises(DeadlineExceeded):
            await pipe.encode([photo], deadline=asyncio.get_running_loop().time() - 1)
        engine.end()
        with pytest.raises(Unavailable, match="is restarting"):
            await pipe.encode([photo], deadline=math.inf)


async def test_a_client_that_has_gone_is_dropped_before_decoding(photo):
    engine, metrics, held = LocalEngine(), new_metrics(), threading.Event()
    with ThreadPoolExecutor(1) as headers, ThreadPoolExecutor(1) as decoders:
        decoders.submit(held.wait)
        async with new_batcher(engine) as batcher:
            pipe = new_pipeline(engine, batcher, metrics, headers=headers, decoders=decoders)
            gone = asyncio.ensure_future(pipe.encode([photo] * 3, deadline=math.inf))
            await asyncio.sleep(0.05)
            gone.cancel()
            await asyncio.wait([gone])
            held.set()
            assert len((await pipe.encode([photo], deadline=math.inf)).rows) == 1
    assert [len(batch) for batch in engine.batches] == [1]
    assert sample(metrics, 'mlcd_dropped_total{reason="client_gone"}') == 3
    assert sample(metrics, 'mlcd_decode_duration_seconds_count{format="JPEG"}') <= 4


async def test_a_large_request_leaves_decoders_to_a_small_one(photo):
    engine = LocalEngine(latency_s=0.0)
    async with new_batcher(engine) as batcher:
        pipe = new_pipeline(engine, batcher)
        large = asyncio.ensure_future(pipe.encode([photo] * 60, deadline=math.inf))
        await asyncio.sleep(0.02)
        await pipe.encode([photo], deadline=math.inf)
        assert not large.done()
        assert sum(len(batch) for batch in engine.batches) < 40
        assert len((await large).rows) == 60


async def test_pictures_that_take_long_leave_decoders_to_the_others(photo):
    buffer = io.BytesIO()
    Image.new("L", (4001, 4000), 128).save(buffer, "PNG")
    engine, held = LocalEngine(latency_s=0.0), threading.Event()
    with ThreadPoolExecutor(1) as decoders, ThreadPoolExecutor(1) as large:
        large.submit(held.wait, 15)
        async with new_batcher(engine) as batcher:
            pipe = new_pipeline(engine, batcher, decoders=decoders, large=large)
            bombs = [
                asyncio.ensure_future(pipe.encode([buffer.getvalue()], deadline=math.inf))
                for _ in range(3)
            ]
            await asyncio.sleep(0.1)
            assert len((await pipe.encode([photo], deadline=math.inf)).rows) == 1
            assert not any(bomb.done() for bomb in bombs)
            held.set()
            assert [len(encoded.rows) for encoded in await asyncio.gather(*bombs)] == [1, 1, 1]


async def test_an_account_is_charged_by_headers_before_anything_is_decoded(photo):
    class Poor:
        owner, charged = "poor", ()

        async def charge(self, pixels):
            self.charged = pixels
            raise RateExceeded(1, retry_after_s=1)

    engine, metrics, account = LocalEngine(), new_metrics(), Poor()
    async with new_batcher(engine) as batcher:
        pipe = new_pipeline(engine, batcher, metrics)
        with pytest.raises(RateExceeded):
            await pipe.encode([photo, b"", photo], deadline=math.inf, account=account)
    assert account.charged == [640 * 427, 0, 640 * 427]
    assert sample(metrics, 'mlcd_decode_duration_seconds_count{format="JPEG"}') == 0
    assert sample(metrics, 'mlcd_held{of="images"}') == 0


async def test_the_deadline_cancels_the_work():
    gone = asyncio.Event()

    async def slow():
        try:
            await asyncio.sleep(10)
        finally:
            gone.set()

    with pytest.raises(DeadlineExceeded):
        await within_deadline(slow(), asyncio.get_running_loop().time() + 0.02)
    assert gone.is_set()


class CountingPool(ThreadPoolExecutor):
    num_tasks = 0

    def submit(self, *task, **named):
        self.num_tasks += 1
        return super().submit(*task, **named)


async def test_warming_up_reads_and_decodes_and_counts_as_nothing():
    engine, metrics = LocalEngine(), new_metrics()
    headers, decoders = CountingPool(1), CountingPool(1)
    async with new_batcher(engine) as batcher:
        await new_pipeline(engine, batcher, metrics, headers=headers, decoders=decoders).warm_up()
    assert (headers.num_tasks, decoders.num_tasks) == (1, 1)
    assert sample(metrics, 'mlcd_decode_duration_seconds_count{format="JPEG"}') == 0


async def test_the_headers_of_small_images_need_no_thread():
    engine, headers = LocalEngine(), CountingPool(1)
    async with new_batcher(engine) as batcher:
        pipe = new_pipeline(engine, batcher, headers=headers)
        small = io.BytesIO()
        Image.new("L", (8, 8), 200).save(small, "PNG")
        found = await pipe.encode([small.getvalue(), small.getvalue()[:-20]], deadline=math.inf)
        assert (found.rows, found.errors[1].reason) == ([0], "undecodable")
        assert headers.num_tasks == 0
        await pipe.encode([small.getvalue() + bytes(2**14)], deadline=math.inf)
        assert headers.num_tasks == 1


@pytest.mark.parametrize(
    ("kind", "size", "num_images", "num_tasks"),
    [
        ("PNG", (128, 64), 1, 0),
        ("JPEG", (100, 128), 1, 0),
        ("PNG", (128, 64), 2, 2),
        ("PNG", (129, 100), 1, 1),
        ("PNG", (128, 63), 1, 1),
        ("GIF", (64, 64), 1, 1),
    ],
)
async def test_only_a_lone_small_image_is_decoded_without_a_thread(
    kind, size, num_images, num_tasks
):
    engine, metrics, decoders = LocalEngine(), new_metrics(), CountingPool(1)
    told = []
    async with new_batcher(engine) as batcher:
        pipe = new_pipeline(engine, batcher, metrics, headers=CountingPool(1), decoders=decoders)
        image = io.BytesIO()
        Image.new("RGB", size, "red").save(image, kind)
        found = await pipe.encode(
            [image.getvalue()] * num_images,
            deadline=math.inf,
            on_outcome=lambda index, _: told.append(index),
        )
    assert decoders.num_tasks == num_tasks
    assert found.rows == sorted(told) == [*range(num_images)]
    counted = f'mlcd_decode_duration_seconds_count{{format="{kind}"}}'
    assert sample(metrics, counted) == num_images


async def test_a_lone_small_image_that_is_damaged_is_rejected():
    engine = LocalEngine()
    async with new_batcher(engine) as batcher:
        image = io.BytesIO()
        noise = random.Random(0).randbytes(64 * 64)
        Image.frombytes("L", (64, 64), noise).save(image, "PNG")
        pipe = new_pipeline(engine, batcher)
        found = await pipe.encode([image.getvalue()[:2000]], deadline=math.inf)
    assert (found.rows, found.errors[0].reason) == ([], "undecodable")
