import time

import numpy as np
import pytest

from service.inference.engine.worker import _measured


def timed_encoder(seconds_each):
    sizes = []

    def encode(items):
        sizes.append(len(items))
        time.sleep(seconds_each * len(items))

    return encode, sizes


def test_a_large_batch_that_takes_long_is_tried_in_part_and_its_time_follows():
    encode, sizes = timed_encoder(0.1)
    times = _measured(encode, np.zeros((32, 1)))
    assert 1 <= max(sizes) <= 5
    assert times["longest_s"] == pytest.approx(3.2, rel=0.5)


def test_a_batch_that_takes_little_is_run_whole():
    encode, sizes = timed_encoder(0.0001)
    times = _measured(encode, np.zeros((32, 1)))
    assert max(sizes) == 32
    assert times["longest_s"] > times["shortest_s"]
