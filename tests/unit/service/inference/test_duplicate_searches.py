import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from mlcd.errors import DeadlineExceeded, InvalidInput, Overloaded
from mlcd.service.inference import duplicate_searches
from mlcd.service.inference.duplicate_searches import DuplicateSearches
from mlcd.types import unit_rows
from tests.unit.service.engines import new_metrics


class State:
    def __init__(self, num=20):
        self.rows = unit_rows(np.random.default_rng(0).standard_normal((num, 4)))
        self.rows[1] = self.rows[0]

    def list_rows(self):
        return [f"i{row}" for row in range(len(self.rows))], self.rows.__getitem__


@pytest.fixture
def held(monkeypatch):
    """Searches that go on until they are let go; (names of those that ran, the way to let go)."""
    ran, gate = [], SimpleNamespace(open=False)
    search = duplicate_searches.duplicate_groups

    def held_search(num, take, similarity, *, meter):
        ran.append(similarity)
        while not gate.open:
            meter.advance(0)
            time.sleep(0.005)
        return search(num, take, similarity, meter=meter)

    monkeypatch.setattr(duplicate_searches, "duplicate_groups", held_search)
    return ran, gate


def begin(searches, collection, similarity, owner=None, seconds=10.0):
    deadline = asyncio.get_running_loop().time() + seconds
    finding = searches.find(collection, similarity, owner=owner, deadline=deadline)
    return asyncio.create_task(finding)


def new_searches():
    return DuplicateSearches(ThreadPoolExecutor(1), new_metrics())


async def settled():
    await asyncio.sleep(0.1)


async def has_run(ran, similarity):
    for _ in range(2000):
        if similarity in ran:
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"the search for {similarity} has not begun in 10 s")


async def test_the_same_search_is_done_once_and_its_result_kept_until_the_collection_changes(held):
    ran, gate = held
    searches, collection = new_searches(), SimpleNamespace(state=State())
    together = [begin(searches, collection, 0.99) for _ in range(5)]
    await settled()
    gate.open = True
    found = await asyncio.gather(*together)
    assert [group.rows.tolist() for group in found[0].groups] == [[0, 1]]
    assert await begin(searches, collection, 0.99) is found[0]
    assert ran == [0.99]
    collection.state = State()
    assert await begin(searches, collection, 0.99) is not found[0]
    assert ran == [0.99, 0.99]


async def test_one_runs_one_waits_and_a_further_one_is_refused(held):
    ran, gate = held
    searches, collection = new_searches(), SimpleNamespace(state=State())
    first = begin(searches, collection, 0.7)
    await has_run(ran, 0.7)
    tasks = [first, begin(searches, collection, 0.8)]
    await settled()
    for number in (5, 6):
        with pytest.raises(Overloaded):
            await begin(searches, collection, number / 10)
    gate.open = True
    await asyncio.gather(*tasks)
    assert ran == [0.7, 0.8]


async def test_a_client_whose_search_runs_gives_the_place_to_another(held):
    ran, gate = held
    searches, collection = new_searches(), SimpleNamespace(state=State())
    first = begin(searches, collection, 0.7, "greedy")
    await has_run(ran, 0.7)
    second = begin(searches, collection, 0.8, "greedy")
    await settled()
    other = begin(searches, collection, 0.9, "other")
    with pytest.raises(Overloaded):
        await second
    with pytest.raises(Overloaded):
        await begin(searches, collection, 0.6, "greedy")
    with pytest.raises(Overloaded):
        await begin(searches, collection, 0.6, "third")
    gate.open = True
    await asyncio.gather(first, other)
    assert ran == [0.7, 0.9]


async def test_a_search_ends_when_nobody_waits_for_it_any_more(held):
    ran, gate = held
    searches, collection = new_searches(), SimpleNamespace(state=State())
    late = begin(searches, collection, 0.7, seconds=0.05)
    with pytest.raises(DeadlineExceeded):
        await late
    left = begin(searches, collection, 0.8)
    await has_run(ran, 0.8)
    stays = begin(searches, collection, 0.9)
    await settled()
    left.cancel()
    await has_run(ran, 0.9)  # the thread is free for the one that waited
    assert ran == [0.7, 0.8, 0.9]
    gate.open = True
    assert len((await stays).groups) >= 1


async def test_pictures_are_compared_of_as_many_items_as_a_request_has_time_for(monkeypatch):
    searches, collection = new_searches(), SimpleNamespace(state=State())
    monkeypatch.setattr(duplicate_searches, "_MAX_COMPARED", 19)
    with pytest.raises(InvalidInput, match="pictures of at most 19 items, got 20"):
        await begin(searches, collection, None)
    assert (await begin(searches, collection, 0.9999)).nearest is None
