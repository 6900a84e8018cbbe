"""Threads over rows: as many as BLAS may have, and a process that has no more files has some, too."""

import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from mlcd.clustering import row_threads
from mlcd.clustering.row_threads import (
    allow_threads,
    allowed_threads,
    batches,
    in_threads,
    limited_blas,
)
from mlcd.cores import available_cores

CORES = available_cores()


@contextmanager
def threads_of_torch(num):
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def names_of(items):
    """Returns the threads that worked on so many items, which wait for each other."""
    found, together = set(), threading.Barrier(items)

    def work(_):
        found.add(threading.current_thread().name)
        together.wait(10)

    in_threads(work, range(items))
    return found


@pytest.mark.parametrize("most", [1, 2, 64])
def test_whoever_limits_blas_limits_them(most):
    with threadpool_limits(most, user_api="blas"):
        with limited_blas():  # the first to ask in this process
            found = allowed_threads()
        allowed = allowed_threads()
        assert found == allowed
        assert allowed <= min(most, CORES)
        assert len(names_of(allowed)) == allowed
        with limited_blas():  # their own limit is not one of them
            assert allowed_threads() == allowed
        assert allowed_threads() == allowed


def test_one_thread_is_the_callers_own():
    with threadpool_limits(1, user_api="blas"):
        assert names_of(1) == {threading.current_thread().name}


def test_an_error_of_one_thread_is_the_callers():
    with (
        threadpool_limits(2, user_api="blas"),
        pytest.raises(ZeroDivisionError),
    ):
        in_threads(lambda item: 1 // item, [1, 0])
    assert allowed_threads() >= 1


def test_too_many_open_files_cost_only_time(monkeypatch):
    def refused(kind):
        raise OSError(24, f"Too many open files to look at {kind}")

    monkeypatch.setattr(row_threads, "_libraries", refused)
    done = []
    in_threads(done.append, range(5))
    assert sorted(done) == [*range(5)]
    assert allowed_threads() == CORES


def test_batches_cover_everything_once(monkeypatch):
    monkeypatch.setattr(row_threads, "allowed_threads", lambda: 3)
    for num, most, least in ((0, 10, 1), (1, 10, 1), (100, 10, 1), (100, 64, 50), (7, 64, 1)):
        parts = batches(num, most=most, least=least)
        assert [row for part in parts for row in np.arange(num)[part]] == [*range(num)]
        assert all(part.stop - part.start <= most for part in parts)


def test_a_budget_holds_whatever_is_loaded_later(monkeypatch):
    """A library that comes later has a BLAS of its own, with as many threads as there are cores."""
    monkeypatch.setattr(row_threads._Limit, "allowed", sys.maxsize)  # whatever ran before
    monkeypatch.setattr(row_threads, "_threads_of_blas", lambda: 64)
    monkeypatch.setattr(row_threads, "available_cores", lambda: 64)
    assert allowed_threads() == 64
    allow_threads(3)
    assert allowed_threads() == 3
