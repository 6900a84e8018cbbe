import asyncio
import math

import pytest

from mlcd.errors import Overloaded
from mlcd.service.inference.admission import Capacity, DrainRate, bound_retry_s
from mlcd.service.inference.fair import FairQueue
from tests.unit.service.engines import new_admission, new_metrics


async def test_images_that_would_be_late_are_refused_and_the_first_ones_never_are():
    admission = new_admission()
    now = asyncio.get_running_loop().time()
    with admission.images.hold(
        10, deadline=now + 10
    ):  # ten images in a twentieth of a second and more
        await asyncio.sleep(0.05)
    with admission.images.hold(50, deadline=now + 0.001):  # nobody is ahead: it is tried
        with pytest.raises(Overloaded):
            admission.images.hold(40, deadline=asyncio.get_running_loop().time() + 0.1).__enter__()
        with admission.images.hold(1, deadline=math.inf):
            assert not admission.images.full
    with admission.images.hold(100, deadline=math.inf):
        assert admission.images.full


async def test_a_small_request_is_not_refused_for_a_large_one_s_sake():
    """They are served in turn: the small one is done after two items, not after a hundred."""
    admission = new_admission(max_texts=1000)
    with admission.texts.hold(10, deadline=math.inf):
        await asyncio.sleep(0.1)
    with admission.texts.hold(500, deadline=math.inf):  # five seconds and more
        soon = asyncio.get_running_loop().time() + 1
        assert admission.texts.has_room(1, deadline=soon)
        assert not admission.texts.has_room(400, deadline=soon)


async def test_a_client_is_told_to_come_back_when_half_is_done():
    admission = new_admission()
    assert admission.retry_after_s == 1
    with admission.images.hold(1, deadline=math.inf):
        await asyncio.sleep(0.1)
    with admission.images.hold(100, deadline=math.inf):  # ten seconds' worth
        assert 4 <= admission.retry_after_s <= 8


def test_the_rate_is_of_the_time_in_which_there_was_work_and_of_late():
    rate = DrainRate()
    assert rate.seconds_for(10, 0.0) == 0
    for start in (0.0, 100.0):  # an idle time between does not count
        rate.start_work(start)
        rate.count_finished(10, start + 1, idle=True)
    assert rate.seconds_for(10, 101.0) == pytest.approx(1)
    rate.start_work(200.0)
    for second in range(1, 30):
        rate.count_finished(100, 200.0 + second, idle=False)
    assert rate.seconds_for(100, 230.0) == pytest.approx(1, rel=0.01)


def test_the_first_image_of_a_slow_batch_says_nothing_of_the_rate():
    rate = DrainRate()
    rate.start_work(0.0)
    for number in range(32):  # one batch of four seconds, whose answers come one by one
        rate.count_finished(1, 4 + number / 1000, idle=False)
        assert rate.seconds_for(31, 4 + number / 1000) == 0
    assert rate.seconds_for(31, 4.5) == pytest.approx(4, rel=0.05)
    for number in range(32):
        rate.count_finished(1, 8 + number / 1000, idle=False)
        assert rate.seconds_for(32, 8 + number / 1000) == pytest.approx(4, rel=0.05)


def test_retry_after_is_whole_seconds_from_1_to_30():
    assert [bound_retry_s(seconds) for seconds in (0, 0.2, 1.2, 29.5, 900)] == [1, 1, 2, 30, 30]


def test_a_fair_queue_serves_requests_in_turn_and_each_in_order():
    queue = FairQueue()
    for number in range(4):
        queue.put("a", f"a{number}")
    queue.put("b", "b0")
    assert (len(queue), queue.take()) == (5, "a0")
    queue.put("c", "c0")
    assert [queue.take() for _ in range(len(queue))] == ["b0", "a1", "c0", "a2", "a3"]


async def test_room_is_told_as_admission_gives_it():
    """A refusal before the body must refuse what would be refused after it, and nothing else."""
    admission = new_admission()
    now = asyncio.get_running_loop().time()
    assert admission.images.has_room(100, deadline=now - 1)  # nobody is ahead
    assert not admission.images.has_room(101, deadline=math.inf)
    with admission.images.hold(10, deadline=now + 10):
        await asyncio.sleep(0.05)
    with admission.images.hold(50, deadline=math.inf):
        seen = set()
        for num in (1, 30, 51):
            for time_left in (0.01, 0.3, 5.0):
                deadline = asyncio.get_running_loop().time() + time_left
                room = admission.images.has_room(num, deadline=deadline)
                try:
                    with admission.images.hold(num, deadline=deadline):
                        assert room
                except Overloaded:
                    assert not room
                seen.add(room)
        assert seen == {True, False}


def new_capacity(most, always=0):
    return Capacity("bytes", most, min_per_owner=always, metrics=new_metrics())


def test_it_is_bounded_and_given_back():
    capacity = new_capacity(10)
    for _ in range(3):
        capacity.reserve(10, owner=None)
        with pytest.raises(Overloaded, match="the server is at its limit of bytes"):
            capacity.reserve(1, owner=None)
        capacity.release(10, owner=None)
    with pytest.raises(ZeroDivisionError), capacity.hold(10, owner=None):
        _ = 1 / 0
    capacity.reserve(10, owner=None)


def test_an_owner_leaves_as_much_free_as_it_holds():
    capacity = new_capacity(120, always=10)
    for greedy, most in (("a", 60), ("b", 30), ("c", 15)):  # half of what the ones before left
        capacity.reserve(most, owner=greedy)
        with pytest.raises(Overloaded, match="this client"):
            capacity.reserve(1, owner=greedy)
    capacity.reserve(5, owner="newcomer")
    capacity.release(60, owner="a")
    capacity.reserve(25, owner="c")


def test_what_one_owner_may_always_hold_fits_however_little_there_is():
    capacity = new_capacity(12, always=10)
    capacity.reserve(10, owner="a")
    with pytest.raises(Overloaded):
        capacity.reserve(1, owner="a")
    capacity.release(10, owner="a")


def test_what_is_only_looked_at_is_not_held():
    capacity = new_capacity(10)
    for _ in range(3):
        capacity.check(10, owner=None)
    with pytest.raises(Overloaded):
        capacity.check(11, owner=None)
