"""Threads of decoders, shared by pixels."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from mlcd.service.inference.decoding_threads import DecodingThreads
from mlcd.service.inference.fair import CostQueue
from tests.unit.service.engines import until


def order_of(queue, num):
    return [queue.take() for _ in range(num)]


def test_small_ones_of_others_come_first_and_those_of_one_owner_in_order():
    queue = CostQueue()
    for number in range(3):
        queue.put("bomber", 1000, f"bomb {number}")
    for number in range(2):
        queue.put("client", 10, f"photo {number}")
    queue.put("other", 15, "picture")
    assert order_of(queue, 6) == ["photo 0", "picture", "photo 1", "bomb 0", "bomb 1", "bomb 2"]


def test_a_large_one_comes_whatever_is_put_in_meanwhile():
    queue = CostQueue()
    queue.put("large", 100, "large")
    taken = []
    for _ in range(20):
        queue.put("small", 10, "small")
        taken.append(queue.take())
    assert 5 < taken.index("large") < 15


def test_who_has_waited_for_nothing_has_saved_nothing_up():
    queue = CostQueue()
    for _ in range(10):
        queue.put("busy", 10, "busy")
    order_of(queue, 9)
    queue.put("late", 10, "late 0")
    queue.put("late", 10, "late 1")
    assert order_of(queue, 3) == ["busy", "late 0", "late 1"]
    assert queue._due == {}


async def test_a_small_picture_waits_for_the_one_under_way_and_for_no_other():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def decode(name):
        begun.set()
        go_on.wait(10)
        done.append(name)
        return name

    with ThreadPoolExecutor(1) as threads:
        decoders = DecodingThreads(threads)
        bombs = [
            asyncio.create_task(decoders.run("bomber", 10**8, lambda: decode("bomb")))
            for _ in range(8)
        ]
        await until(begun.is_set)
        gone = asyncio.create_task(decoders.run("client", 10, lambda: decode("gone")))
        photo = asyncio.create_task(decoders.run("client", 10, lambda: decode("photo")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        go_on.set()
        assert await photo == "photo"
        await asyncio.gather(*bombs)
    assert done == ["bomb", "photo", *["bomb"] * 7]


async def test_what_a_picture_raises_is_its_own():
    def fail():
        raise ValueError("bad")

    with ThreadPoolExecutor(1) as threads:
        decoders = DecodingThreads(threads)
        with pytest.raises(ValueError, match="bad"):
            await decoders.run("x", 1, fail)
        assert await decoders.run("x", 1, lambda: 7) == 7


async def test_a_picture_whose_client_has_left_is_not_kept_until_its_turn():
    class Picture:
        pass

    begun, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        decoders = DecodingThreads(threads)
        first = asyncio.create_task(decoders.run("x", 1, lambda: (begun.set(), go_on.wait(10))))
        await until(begun.is_set)
        picture = Picture()
        kept = weakref.ref(picture)
        gone = asyncio.create_task(decoders.run("y", 1, partial(id, picture)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        del picture, gone
        gc.collect()
        assert kept() is None
        go_on.set()
        await first
