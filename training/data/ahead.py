"""Prefetches steps in a thread."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from mlcd.training.data.loader import StepBatches, StepPart, prepare_thread

_Part = TypeVar("_Part", bound=StepPart)


@contextmanager
def ahead(
    steps: Iterator[StepBatches[_Part]], num: int, device: torch.device
) -> Iterator[Iterator[StepBatches[_Part]]]:
    """Prefetches up to `num` steps in a thread; a step's error is raised when the step is taken."""
    pool = ThreadPoolExecutor(
        1, thread_name_prefix="ahead", initializer=prepare_thread, initargs=(device,)
    )
    try:
        yield _take_ahead(pool, steps, num)
    finally:
        pool.shutdown(cancel_futures=True)


def _take_ahead(
    pool: ThreadPoolExecutor, steps: Iterator[StepBatches[_Part]], num: int
) -> Iterator[StepBatches[_Part]]:
    def submit() -> Future[StepBatches[_Part] | None]:
        return pool.submit(next, steps, None)

    waiting = deque(submit() for _ in range(num))
    while True:
        start = time.perf_counter()
        batch = waiting.popleft().result()
        if batch is None:
            return
        waiting.append(submit())
        yield replace(batch, wait_s=time.perf_counter() - start)
