"""The adapter against the real server: what it answers, and what it says when Triton
cannot answer.
"""

import asyncio
import contextlib
import time

import numpy as np
import pytest

from mlcd.encoders.openvino import OpenVinoEncoder, read_onnx
from mlcd.encoders.triton import open_triton
from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    Unavailable,
)
from mlcd.models import zoo
from tests.triton.conftest import SLOW_BATCH, SLOW_QUEUE, SLOW_S, export, flooded, write_model

pytestmark = pytest.mark.triton

# The longest time until readiness reports a change.
FLIP_S = 2.0
AT_ONCE_S = 0.05
BACK_S = 15.0


@contextlib.asynccontextmanager
async def opened(server, name="tiny", **options):
    encoder = await open_triton(server.url, name, **options)
    try:
        yield encoder
    finally:
        await encoder.close()


async def seconds_until(condition, limit_s):
    started = time.perf_counter()
    while not condition():
        assert time.perf_counter() - started < limit_s, "it did not happen in time"
        await asyncio.sleep(0.02)
    return time.perf_counter() - started


async def failure(call):
    """The error of a call, and the seconds it took to say so."""
    started = time.perf_counter()
    with pytest.raises(Exception) as caught:
        await call
    return caught.value, time.perf_counter() - started


async def test_rows_are_those_of_the_embedded_engine(server, weights, repository, pictures):
    preprocess = zoo.load(str(weights)).preprocess
    graph = read_onnx(repository / "tiny" / "1" / "model.onnx")
    embedded = OpenVinoEncoder(graph, name="tiny", fingerprint="", preprocess=preprocess)
    many = np.concatenate([pictures] * 3)  # more than a batch

    async with opened(server) as encoder:
        assert encoder.fingerprint == zoo.load(str(weights)).fingerprint()
        assert (encoder.preprocess, encoder.dimension) == (preprocess, embedded.dimension)
        assert (encoder.version, encoder.max_batch, encoder.precision) == (1, 64, "fp32")
        assert (await encoder.encode(many[:0], timeout_s=10)).shape == (0, encoder.dimension)
        rows, alone = (
            await encoder.encode(many, timeout_s=10),
            await encoder.encode(many[5:6], timeout_s=10),
        )
    assert rows.dtype == np.float32
    assert (rows * embedded.encode(many)).sum(axis=1).min() >= 0.9999
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(len(many)), abs=1e-6)
    assert alone[0] == pytest.approx(rows[5], abs=1e-5)


async def test_concurrent_single_images_ride_together(server, pictures):
    def counts():
        return [server.metric(f"nv_inference_{what}", "tiny") for what in ("count", "exec_count")]

    def settled():
        """Counted is an answer only after it has gone: those of the test before, too."""
        latest, before = counts(), None
        while latest != before:
            time.sleep(0.3)
            latest, before = counts(), latest
        return latest

    async with opened(server) as encoder:
        before = settled()
        for _ in range(4):
            await asyncio.gather(
                *(encoder.encode(pictures[i : i + 1], timeout_s=10) for i in range(32))
            )
    count, executions = (now - then for now, then in zip(settled(), before, strict=True))
    assert count == 4 * 32
    assert count / executions > 2


async def test_another_shape_or_type_is_refused_here(server, pictures):
    async with opened(server) as encoder:
        for wrong in (pictures.astype(np.float32), pictures[..., :-1], pictures[:, :1]):
            with pytest.raises(InvalidInput, match="expected uint8 images"):
                await encoder.encode(wrong, timeout_s=10)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("nobody", {}, Unavailable, "the model nobody is not loaded in Triton"),
        (
            "tiny",
            {"version": 7},
            Unavailable,
            "version 7 of the model tiny is not loaded in Triton",
        ),
        ("bare", {}, ArtifactInvalid, r"bare must have the parameter fingerprint\.1: export it"),
        ("../up", {}, ConfigInvalid, "cannot name a model"),
    ],
)
async def test_what_cannot_be_served_is_not_opened(server, name, options, error, message):
    with pytest.raises(error, match=message):
        await open_triton(server.url, name, **options)


async def test_a_full_queue_is_overload_and_neighbors_are_answered(server, pictures):
    num = 4 * (SLOW_BATCH + SLOW_QUEUE)

    async with opened(server, "slow") as encoder:
        calls = [encoder.encode(pictures[:1], timeout_s=20) for _ in range(num)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert encoder.up
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert {type(answer) for answer in refused} == {Overloaded}
    assert SLOW_QUEUE <= num - len(refused) < num
    assert str(refused[0]) == "Triton's queue is full: try again in a moment"


async def test_a_late_request_says_so_in_time(server, pictures):
    async with opened(server, "slow") as encoder:
        error, seconds = await failure(encoder.encode(pictures[:1], timeout_s=SLOW_S / 3))
        past, at_once = await failure(encoder.encode(pictures[:1], timeout_s=0))
    assert isinstance(error, DeadlineExceeded)
    assert seconds < SLOW_S
    assert isinstance(past, DeadlineExceeded)
    assert at_once < AT_ONCE_S


async def test_a_server_that_others_keep_busy_is_not_taken_for_a_dead_one(server, pictures):
    """None of ours is answered, the probes neither: Triton's own statistics say that it works."""
    errors, faults = [], []

    async with opened(server, "slow", probe_timeout_s=2 * SLOW_S) as encoder:
        with flooded(server, "slow"):
            until = time.perf_counter() + 4
            while time.perf_counter() < until:
                error, _ = await failure(encoder.encode(pictures[:1], timeout_s=SLOW_S))
                errors.append(type(error))
                faults.append(encoder.fault)
    assert set(errors) <= {DeadlineExceeded, Overloaded}
    assert DeadlineExceeded in errors
    assert set(faults) == {None}


async def test_a_caller_that_goes_cancels_in_triton(server, pictures):
    def cancelled():
        return server.metric("nv_inference_request_failure", "slow", reason="CANCELED")

    async with opened(server, "slow") as encoder:
        before = cancelled()
        calls = [
            asyncio.create_task(encoder.encode(pictures[:1], timeout_s=20))
            for _ in range(SLOW_QUEUE)
        ]
        await asyncio.sleep(SLOW_S / 3)
        for call in calls:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {asyncio.CancelledError}
        assert encoder.up
        await seconds_until(lambda: cancelled() > before, 5)


async def test_an_unloaded_model_is_told_and_comes_back(own_server, pictures):
    async with opened(own_server) as encoder:
        await asyncio.to_thread(own_server.unload, "tiny")
        error, _ = await failure(encoder.encode(pictures[:1], timeout_s=5))
        assert isinstance(error, Unavailable)
        assert str(error) == "version 1 of the model tiny is not loaded in Triton: load it there"
        await seconds_until(lambda: not encoder.up, FLIP_S)
        await asyncio.to_thread(own_server.load, "tiny")
        await seconds_until(lambda: encoder.up, BACK_S)
        assert len(await encoder.encode(pictures, timeout_s=5)) == len(pictures)


async def test_another_model_under_the_same_name_is_not_served(own_server, pictures, tmp_path):
    async with opened(own_server) as encoder:
        await asyncio.to_thread(own_server.unload, "tiny")
        await seconds_until(lambda: not encoder.up, FLIP_S)
        export(write_model(tmp_path / "other", seed=7), tmp_path / "out", "tiny")
        (own_server.repository / "tiny").rename(tmp_path / "old")
        (tmp_path / "out" / "tiny").rename(own_server.repository / "tiny")
        await asyncio.to_thread(own_server.load, "tiny")
        await seconds_until(lambda: "has changed" in str(encoder.fault), BACK_S)
        error, _ = await failure(encoder.encode(pictures[:1], timeout_s=5))
        assert isinstance(error, Unavailable)
        async with opened(own_server) as again:
            assert again.fingerprint != encoder.fingerprint


async def test_a_killed_server_costs_nothing_and_its_successor_is_found(own_server, pictures):
    async with opened(own_server) as encoder:
        expected = await encoder.encode(pictures, timeout_s=5)
        own_server.kill()
        error, seconds = await failure(encoder.encode(pictures[:1], timeout_s=5))
        assert isinstance(error, Unavailable)
        assert not isinstance(error, DeadlineExceeded)
        assert str(error) == f"Triton at {own_server.url} cannot be reached: is it up?"
        assert seconds < FLIP_S
        await seconds_until(lambda: not encoder.up, FLIP_S)
        _, seconds = await failure(encoder.encode(pictures[:1], timeout_s=5))
        assert seconds < AT_ONCE_S
        await asyncio.to_thread(own_server.start)
        await seconds_until(lambda: encoder.up, BACK_S)
        assert await encoder.encode(pictures, timeout_s=5) == pytest.approx(expected, abs=1e-5)


async def test_a_hanging_server_fails_its_waiters_and_recovers(own_server, pictures):
    async with opened(own_server) as encoder:
        own_server.pause()
        errors = await asyncio.gather(
            failure(encoder.encode(pictures[:1], timeout_s=0.3)),
            failure(encoder.encode(pictures[:1], timeout_s=30)),
        )
        (late, late_s), (waiting, waiting_s) = errors
        assert isinstance(late, DeadlineExceeded)
        assert late_s < 1
        assert type(waiting) is Unavailable
        assert waiting_s < FLIP_S
        assert not encoder.up
        error, seconds = await failure(encoder.encode(pictures[:1], timeout_s=30))
        assert isinstance(error, Unavailable)
        assert seconds < AT_ONCE_S
        own_server.resume()
        await seconds_until(lambda: encoder.up, BACK_S)
        assert len(await encoder.encode(pictures, timeout_s=5)) == len(pictures)


async def test_a_failing_model_is_down_and_its_text_stays_there(server, repository, pictures):
    """Triton calls it ready all the while; inferences say otherwise."""
    switch = repository / "broken" / "1" / "broken"
    try:
        async with opened(server, "broken") as encoder:
            switch.touch()
            error, _ = await failure(encoder.encode(pictures[:1], timeout_s=5))
            assert str(error) == "the model broken failed in Triton: Triton's log says why"
            await seconds_until(lambda: not encoder.up, FLIP_S)
            switch.unlink()
            await seconds_until(lambda: encoder.up, BACK_S)
    finally:
        switch.unlink(missing_ok=True)


async def test_a_closed_encoder_fails_its_waiters_and_says_so(server, pictures):
    encoder = await open_triton(server.url, "slow")
    waiting = asyncio.create_task(failure(encoder.encode(pictures[:1], timeout_s=20)))
    await asyncio.sleep(SLOW_S / 3)
    await encoder.close()
    await encoder.close()
    (error, _), (later, _) = (
        await waiting,
        await failure(encoder.encode(pictures[:1], timeout_s=20)),
    )
    assert str(error) == str(later) == "the encoder is closed"
    assert not encoder.up


async def test_nobody_at_the_address():
    for address, error in (
        ("127.0.0.1:9", Unavailable),
        ("nowhere", ConfigInvalid),
        ("http://x:1", ConfigInvalid),
    ):
        with pytest.raises(error):
            await open_triton(address, "tiny")
