import asyncio
import time

import pytest

from mlcd.service.telemetry.request import (
    RequestRecord,
    begin_request,
    count_images,
    current_request,
    read_trace,
    time_stage,
    took,
)

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_trace_that_is_well_formed_is_taken_with_its_state():
    expected = {"traceparent": GOOD, "tracestate": "a=1,b=2"}
    assert read_trace({b"traceparent": GOOD.encode(), b"tracestate": b"a=1,b=2"}) == expected
    record = RequestRecord("r", read_trace({b"traceparent": GOOD.encode()}))
    assert record.trace_ids == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


@pytest.mark.parametrize(
    "parent",
    [
        "",
        GOOD.upper(),
        GOOD + "-x",
        GOOD + "\n",
        "ff" + GOOD[2:],
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        GOOD.replace("b7ad6b7169203331", "0" * 16),
        "\u00e9" * 55,
    ],
)
def test_one_that_is_not_is_none(parent):
    assert read_trace({b"traceparent": parent.encode("latin-1"), b"tracestate": b"a=1"}) == {}


@pytest.mark.parametrize("state", [b"", b"a" * 513, b"a=\xff", b"a=\x01"])
def test_a_state_that_is_odd_is_left_out(state):
    assert read_trace({b"traceparent": GOOD.encode(), b"tracestate": state}) == {
        "traceparent": GOOD
    }


async def test_tasks_of_a_request_tell_their_stages_to_it_and_others_to_nobody():
    async def image(started, ended):
        took("decode", started, ended)

    count_images(1)
    took("decode", 0.0, 100.0)  # outside of any request
    record = RequestRecord("r")

    async def handler():
        begin_request(record)
        await asyncio.gather(image(1.0, 2.0), image(1.5, 4.0), image(0.5, 1.0))
        count_images(3)
        with time_stage("labels"):
            await asyncio.sleep(0.01)

    await asyncio.create_task(handler())
    assert current_request() is None
    assert (record.num_images, record.stages["decode"]) == (3, (0.5, 4.0))
    started, ended = record.stages["labels"]
    assert 0.01 <= ended - started < 5
    assert abs(time.perf_counter() - ended) < 5
