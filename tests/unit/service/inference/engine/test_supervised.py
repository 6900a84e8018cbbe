"""The engine's process, for real: what it gives, and what becomes of it when it is killed, stopped
or fails.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlcd.encoders import open_encoder
from mlcd.errors import ConfigInvalid, NotFound, Unavailable
from mlcd.service.inference.engine.process import EngineBatch, EngineFailed
from mlcd.service.inference.engine.supervised import SupervisedEngine
from mlcd.service.inference.served import EngineOptions
from tests.unit.service.engines import until


def engine(spec="fake:latency_ms=1", *, batch_timeout_s=10.0, **options):
    return SupervisedEngine(
        EngineOptions(spec, **{"max_batch": 4} | options), batch_timeout_s=batch_timeout_s
    )


def pictures(num, value=7, side=32):
    return EngineBatch([np.full((3, side, side), value, np.uint8) for _ in range(num)])


async def all_of(*calls):
    return await asyncio.gather(*calls, return_exceptions=True)


def alive(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_rows_are_those_of_the_encoder_itself():
    images = np.random.default_rng(0).integers(0, 256, (9, 3, 64, 64), dtype=np.uint8)
    own = open_encoder("hog")
    async with engine("hog") as running:
        assert running.served.fingerprint == own.fingerprint
        assert running.served.preprocess == own.preprocess
        parts = await asyncio.gather(
            *(running.encode(EngineBatch([*images[start : start + 4]])) for start in (0, 4, 8))
        )
        assert np.array_equal(np.concatenate([part.rows for part in parts]), own.encode(images))


async def test_a_batch_is_no_larger_than_what_fits_into_the_time_by_what_was_measured():
    async with engine("hog") as running:
        assert running.served.shortest_s > 0
        assert running.served.longest_s > 0
        slow = replace(running.served, max_batch=32, shortest_s=1.0, longest_s=32.0)
        expected = [2, 2, 7, 31, 32, 32]
        assert [slow.batch_within(seconds) for seconds in (0.1, 1, 7.5, 31.9, 32, 99)] == expected
        alike = replace(slow, shortest_s=2.0, longest_s=2.1)  # smaller would not be shorter
        assert alike.batch_within(0.5) == 32


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("absent", NotFound, "the model absent does not exist"),
        ("fake:latency=5", ConfigInvalid, "the option latency is unknown"),
    ],
)
async def test_what_keeps_it_from_opening_is_told_as_it_is(spec, error, message):
    with pytest.raises(error, match=message):
        async with engine(spec):
            pass


async def test_killed_it_fails_who_waits_at_once_and_comes_back():
    async with engine("fake:latency_ms=300") as running:
        first = running.pid
        waiting = asyncio.gather(
            *(running.encode(pictures(2)) for _ in range(3)), return_exceptions=True
        )
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        started = time.monotonic()
        assert all(isinstance(outcome, Unavailable) for outcome in await waiting)
        assert time.monotonic() - started < 0.2
        await until(lambda: not running.up)
        with pytest.raises(Unavailable, match="is restarting"):
            await running.encode(pictures(1))
        await running.wait_up()
        assert running.pid != first
        assert len((await running.encode(pictures(3))).rows) == 3
        assert not running.failing


async def test_a_batch_that_hangs_costs_the_process_its_life():
    async with engine(batch_timeout_s=0.4) as running:
        hung = running.pid
        os.kill(hung, signal.SIGSTOP)
        outcomes = await all_of(running.encode(pictures(1)), running.encode(pictures(2)))
        assert "did not answer" in str(outcomes[0])
        assert isinstance(outcomes[1], Unavailable)
        await until(lambda: running.pid not in (None, hung) and running.up)
        assert not alive(hung)
        assert len((await running.encode(pictures(1))).rows) == 1


async def test_a_long_batch_counts_as_overdue_before_it_counts_as_hanging():
    async with engine() as running:
        assert (running.overdue, running.overdue_s) == (False, 0.8)
        os.kill(running.pid, signal.SIGSTOP)
        waiting = asyncio.ensure_future(running.encode(pictures(1)))
        await until(lambda: running.overdue)
        os.kill(running.pid, signal.SIGCONT)
        await waiting
        assert not running.overdue


async def test_an_engine_that_raises_lives_and_is_replaced_after_three_failures_in_a_row():
    async with engine("fake:latency_ms=1,sick_s=60") as running:
        first = running.pid
        with pytest.raises(EngineFailed) as caught:
            await running.encode(pictures(1, value=255))
        assert "fails after a white image" not in str(caught.value)
        assert running.failing
        for _ in range(2):
            assert running.pid == first
            with pytest.raises(EngineFailed):
                await running.encode(pictures(1))
        await until(lambda: running.pid not in (None, first) and running.up)
        await running.encode(pictures(1))
        assert not running.failing


async def test_a_process_that_does_not_live_long_is_started_again_after_a_pause():
    async with engine() as running:
        times = []
        for _ in range(2):
            pid, started = running.pid, time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: running.pid not in (None, pid) and running.up)
            times.append(time.monotonic() - started)
        assert times[1] >= 0.5


_PARENT = """
import asyncio
from mlcd.service.inference.engine.supervised import SupervisedEngine
from mlcd.service.inference.served import EngineOptions

async def main():
    engine = SupervisedEngine(EngineOptions("fake:latency_ms=1", 1), batch_timeout_s=1)
    await engine.__aenter__()
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_with_the_server_even_when_that_is_killed(stopped):
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert alive(child)
    os.kill(child, signal.SIGINT)  # Ctrl-C in a terminal reaches both
    if stopped:
        os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 5
    while alive(child):
        assert time.monotonic() < end, "an orphan is left"
        time.sleep(0.01)
