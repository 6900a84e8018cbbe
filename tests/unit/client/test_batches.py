import asyncio
import contextlib
import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from mlcd.client.batches import (
    PART_BYTES,
    ImageBatcher,
    answers_async,
    answers_sync,
    rows_in_batches,
)
from mlcd.errors import ImageRejected


def cut(images, **bounds):
    batcher = ImageBatcher(**{"max_images": 3, "max_body_bytes": 2**20} | bounds)
    batches = [batch for image in images if (batch := batcher.push(image))]
    rest = batcher.take_rest()
    return [*batches, rest] if rest else batches


def test_batches_keep_the_order_and_the_number():
    images = [bytes([i]) for i in range(7)]
    assert cut(images) == [images[:3], images[3:6], images[6:]]
    assert cut(images, max_images=1) == [[image] for image in images]
    assert cut([]) == []


def test_what_is_rejected_keeps_its_place():
    rejection = ImageRejected("empty", "the file is empty")
    assert cut([b"a", rejection, b"b", b"c"]) == [[b"a", rejection, b"b"], [b"c"]]


def test_no_body_is_larger_than_the_server_takes():
    rng = np.random.default_rng(0)
    images = [bytes(int(size)) for size in rng.integers(0, 8000, 300)]
    batches = cut(images, max_images=50, max_body_bytes=10_000)
    assert list(itertools.chain(*batches)) == images
    sizes = [sum(len(image) + PART_BYTES for image in batch) for batch in batches]
    assert max(sizes) <= 10_000
    assert all(
        a + len(b[0]) + PART_BYTES > 10_000 for a, b in zip(sizes, batches[1:], strict=False)
    ), "cut too early"


def test_what_is_in_flight_is_bounded_whatever_the_server_takes():
    batches = cut([bytes(10 * 2**20)] * 3, max_body_bytes=2**30)
    assert [len(batch) for batch in batches] == [1, 1, 1]


def test_rows_are_cut_without_a_copy():
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    batches = list(rows_in_batches(rows, num=2))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert all(np.shares_memory(batch, rows) for batch in batches)


class Source:
    """Counts what is taken from it."""

    def __init__(self, num):
        self.num, self.taken = num, 0

    def __iter__(self):
        for i in range(self.num):
            self.taken += 1
            yield i

    async def __aiter__(self):
        for i in self:
            yield i


def test_the_sync_order_is_that_of_the_source_and_no_more_is_in_flight():
    running, most = set(), []

    def work(i):
        running.add(i)
        most.append(len(running))
        time.sleep(0.03 if i % 3 == 0 else 0.001)
        running.discard(i)
        return i * i

    with ThreadPoolExecutor(8) as pool:
        answers = list(answers_sync(range(20), lambda i: pool.submit(work, i), in_flight=3))
    assert answers == [i * i for i in range(20)]
    assert max(most) == 3


def test_the_sync_source_is_taken_only_as_far_as_requests_are_in_flight():
    source, futures = Source(100), []

    def start(i):
        futures.append(Future())
        if i == 0:
            futures[0].set_result("first")
        if i == 3:
            futures[1].set_result("second")
        return futures[i]

    answers = answers_sync(source, start, in_flight=3)
    assert next(answers) == "first"
    assert source.taken == 1, "what is there is given at once, not when the window is full"
    assert next(answers) == "second"
    assert source.taken == 4
    answers.close()
    assert [future.cancelled() for future in futures] == [False, False, True, True]


def test_a_sync_failure_cancels_the_rest():
    futures = [Future() for _ in range(3)]
    futures[0].set_exception(ValueError("of the first"))
    with pytest.raises(ValueError, match="of the first"):
        list(answers_sync(range(3), lambda i: futures[i], in_flight=3))
    futures[0] = Future()
    futures[1].set_exception(ValueError("of the second"))
    futures[0].set_result(0)
    with pytest.raises(ValueError, match="of the second"):
        list(answers_sync(range(3), lambda i: futures[i], in_flight=3))


def test_the_async_order_is_that_of_the_source_and_no_more_is_in_flight():
    running, most = set(), []

    async def ask(i):
        running.add(i)
        most.append(len(running))
        await asyncio.sleep(0.03 if i % 3 == 0 else 0.001)
        running.discard(i)
        return i * i

    async def main():
        return [answer async for answer in answers_async(Source(20), ask, in_flight=3)]

    assert asyncio.run(main()) == [i * i for i in range(20)]
    assert max(most) == 3


def test_leaving_early_cancels_what_is_in_flight():
    cancelled, source = [], Source(100)

    async def ask(i):
        try:
            await asyncio.sleep(0.001 if i == 0 else 60)
        except asyncio.CancelledError:
            cancelled.append(i)
            raise
        return i

    async def main():
        async with contextlib.aclosing(answers_async(source, ask, in_flight=3)) as answers:
            async for answer in answers:
                assert answer == 0
                break

    asyncio.run(asyncio.wait_for(main(), 10))
    assert source.taken == 3
    assert cancelled == [1, 2]


def test_cancelling_the_caller_cancels_what_is_in_flight():
    cancelled = []

    async def ask(i):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(i)
            raise

    async def all_of_them():
        return [answer async for answer in answers_async(Source(9), ask, in_flight=3)]

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(all_of_them(), 0.05)

    asyncio.run(main())
    assert sorted(cancelled) == [0, 1, 2]


def test_async_answers_do_not_wait_for_the_window_to_fill():
    async def slow():
        for i in range(10):
            taken.append(i)
            yield i
            await asyncio.sleep(0.01)

    async def ask(i):
        return i

    async def main():
        async with contextlib.aclosing(answers_async(slow(), ask, in_flight=8)) as answers:
            return await anext(answers), len(taken)

    taken = []
    assert asyncio.run(main()) == (0, 2)
