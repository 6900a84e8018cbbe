from types import SimpleNamespace

import numpy as np
import pytest

from mlcd.service.inference.engine import worker


@pytest.fixture
def trial(monkeypatch):
    """Measures an encoder by a clock that it alone moves; the sizes of its batches, and times."""

    def measured(seconds_each):
        now, sizes = [0.0], []
        monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: now[0]))

        def encode(items):
            sizes.append(len(items))
            now[0] += seconds_each * len(items)

        return sizes, worker._measure_batches(encode, np.zeros((32, 1)))

    return measured


def test_a_large_batch_that_takes_long_is_tried_in_part_and_its_time_follows(trial):
    sizes, times = trial(0.02)
    assert sizes == [1, 5]
    assert times == {"shortest_s": pytest.approx(0.02), "longest_s": pytest.approx(0.64)}


def test_a_batch_that_takes_little_is_run_whole(trial):
    sizes, times = trial(0.0001)
    assert sizes == [1, 32]
    assert times == {"shortest_s": pytest.approx(0.0001), "longest_s": pytest.approx(0.0032)}
