"""Look-ups that wait for a thread together, against each alone."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mlcd.artifacts.centers import Centers
from mlcd.errors import ArtifactInvalid
from mlcd.service.inference.engine_labels import EngineLabels
from mlcd.service.inference.joined_lookups import JoinedLookups
from mlcd.service.inference.lookup import Lookup
from mlcd.types import unit_rows


class CountedLookup(Lookup):
    """A look-up that keeps the number of rows of each scan, and may wait before it scans."""

    def __init__(self, centers):
        super().__init__(centers)
        self.may_scan, self.num_rows = threading.Event(), []

    def nearest(self, embeddings, *arguments, **options):
        self.may_scan.wait(10)
        self.num_rows.append(len(embeddings))
        return super().nearest(embeddings, *arguments, **options)


@pytest.fixture
def lookup():
    vectors = unit_rows(np.random.default_rng(0).standard_normal((300, 16)))
    return CountedLookup(
        Centers(vectors, np.ones(300, np.int64), "f" * 64, quantiles=np.full(300, 0.4, np.float32))
    )


@pytest.fixture
def joined():
    with ThreadPoolExecutor(1) as threads:
        yield JoinedLookups(threads)


def random_rows(num, seed):
    return unit_rows(np.random.default_rng(seed).standard_normal((num, 16)))


async def start_all(joined, lookup, parts, **options):
    """Starts a look-up that occupies the thread, then the others; returns their tasks."""
    first = asyncio.create_task(joined.nearest(lookup, random_rows(1, 99), 3))
    await asyncio.sleep(0.05)
    tasks = [asyncio.create_task(joined.nearest(lookup, rows, 8, **options)) for rows in parts]
    await asyncio.sleep(0.05)
    lookup.may_scan.set()
    await first
    return tasks


@pytest.mark.parametrize("threshold", [None, 0.5])
async def test_each_request_gets_the_bits_that_it_gets_alone(joined, lookup, threshold):
    parts = [random_rows(num, seed) for seed, num in enumerate([1, 3, 0, 1, 7])]
    tasks = await start_all(joined, lookup, parts, threshold=threshold, are_images=True)
    for rows, (neighbors, num_novel) in zip(parts, await asyncio.gather(*tasks), strict=True):
        alone = Lookup(lookup.centers).nearest(rows, 8, threshold)
        assert neighbors.ids.tobytes() == alone.ids.tobytes()
        assert neighbors.scores.tobytes() == alone.scores.tobytes()
        nearest = Lookup(lookup.centers).nearest(rows, 1).scores[:, 0]
        assert num_novel == ((1 - nearest > 0.4).sum() if len(rows) else None)
    assert 12 in lookup.num_rows


async def test_few_rows_are_joined_and_other_options_are_not(joined, lookup):
    many = await start_all(joined, lookup, [random_rows(30, seed) for seed in range(3)])
    with_threshold = joined.nearest(lookup, random_rows(2, 7), 8, 0.1)
    await asyncio.gather(*many, with_threshold)
    assert sorted(lookup.num_rows) == [1, 2, 30, 60]


async def test_a_request_that_left_is_not_scanned_and_stops_no_other(joined, lookup):
    parts = [random_rows(1, 0), random_rows(4, 1)]
    first = asyncio.create_task(joined.nearest(lookup, random_rows(1, 99), 3))
    await asyncio.sleep(0.05)
    left, stayed = (asyncio.create_task(joined.nearest(lookup, rows, 8)) for rows in parts)
    await asyncio.sleep(0.05)
    left.cancel()
    await asyncio.sleep(0.05)
    lookup.may_scan.set()
    neighbors, _ = await stayed
    await first
    assert (len(neighbors.ids), lookup.num_rows) == (4, [1, 4])
    assert left.cancelled()


async def test_all_joined_requests_get_the_error_of_their_scan(joined, lookup, monkeypatch):
    def fail():
        raise ArtifactInvalid("the centers are damaged")

    monkeypatch.setattr(lookup, "follow_names", fail)
    lookup.may_scan.set()
    answers = await asyncio.gather(
        *(joined.nearest(lookup, random_rows(1, seed), 8) for seed in range(3)),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [ArtifactInvalid] * 3


async def test_labels_of_the_engine_are_used_for_their_own_request(joined, lookup):
    lookup.may_scan.set()
    rows = random_rows(2, 5)
    engine_labels = EngineLabels(lookup.centers.digest, 8)
    scores = lookup.scan.nearest(rows, 8)
    exact = np.einsum("nd,nkd->nk", rows.astype(float), lookup.centers.vectors[scores.ids])
    for row, ids, similarities in zip(rows, scores.ids, exact, strict=True):
        engine_labels.add(row, ids, similarities)
    (with_labels, _), (alone, _) = await asyncio.gather(
        joined.nearest(lookup, rows, 8, engine_labels=engine_labels),
        joined.nearest(lookup, rows, 8),
    )
    assert (engine_labels.num_used, sorted(lookup.num_rows)) == (2, [2, 2])
    assert with_labels.ids.tobytes() == alone.ids.tobytes()
    assert with_labels.scores.tobytes() == alone.scores.tobytes()
