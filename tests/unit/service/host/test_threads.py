import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from mlcd.service.host.threads import ThreadBudget, limit_blas
from mlcd.service.settings import Settings


@pytest.mark.parametrize(
    ("cores", "processes", "given", "expected"),
    [
        (8, 1, {}, (8, 8, 8, 8)),
        (8, 3, {}, (2, 2, 2, 2)),
        (1, 4, {}, (1, 1, 1, 1)),
        (8, 2, {"engine_threads": 3, "decode_threads": 6}, (3, 6, 4, 4)),
    ],
)
def test_processes_share_the_cores(monkeypatch, cores, processes, given, expected):
    monkeypatch.setattr("mlcd.service.host.threads.available_cores", lambda: cores)
    budget = ThreadBudget.of(Settings(model="hog", processes=processes, **given))
    assert (budget.engine, budget.decode, budget.compute, budget.blas) == expected


def numpys_threads():
    """torch's, which other tests load, counts for each thread on its own; the service has none."""
    pools = [
        pool
        for pool in threadpool_info()
        if pool["user_api"] == "blas" and "numpy" in pool["filepath"]
    ]
    return [pool["num_threads"] for pool in pools]


def test_blas_keeps_to_its_part():
    before = max(numpys_threads())
    try:
        threadpool_limits(2, user_api="blas")
        assert set(numpys_threads()) == {2}
        limit_blas(1)
        seen = []

        def elsewhere():
            np.ones((300, 300)) @ np.ones((300, 300))
            seen.extend(numpys_threads())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert set(seen) == {1}
    finally:
        threadpool_limits(before, user_api="blas")
