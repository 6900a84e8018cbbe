import sys
import tracemalloc

from mlcd.service.inference.cache.memory import MemoryCache
from tests.unit.service.engines import new_metrics, sample

EACH = 100 + 256


def test_the_least_recently_used_goes_first():
    cache = MemoryCache(3 * EACH, new_metrics())
    for name in (b"a", b"b", b"c"):
        cache.put(name, bytes(100))
    assert cache.get(b"a") == bytes(100)
    cache.put(b"d", bytes(100))
    expected = [b"a", b"c", b"d"]
    assert [name for name in (b"a", b"b", b"c", b"d") if cache.get(name) is not None] == expected


def test_it_holds_no_more_than_it_may_and_says_how_much():
    metrics = new_metrics()
    cache = MemoryCache(3 * EACH + 50, metrics)
    for number in range(100):
        cache.put(b"%d" % number, bytes(100))
        cache.put(b"%d" % number, bytes(100))
        assert sample(metrics, "mlcd_cache_bytes") == min(number + 1, 3) * EACH
    cache.put(b"large", bytes(10_000))
    assert cache.get(b"large") is None
    assert cache.get(b"99") is not None


def test_what_it_takes_in_truth_is_within_its_bound():
    tracemalloc.start()
    try:
        cache = MemoryCache(4_000_000, new_metrics())
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20_000):
            cache.put(number.to_bytes(32, "big"), bytes(200))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 3_000_000 < after - before < 4_000_000
    assert sys.getsizeof(bytes(32)) < 100
