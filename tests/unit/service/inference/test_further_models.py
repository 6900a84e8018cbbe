"""Further models are opened once, at their first use, and closed when idle or for others' memory."""

import asyncio
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from mlcd.errors import ArtifactInvalid, Unavailable
from mlcd.service.inference import further_models
from mlcd.service.inference.further_models import FurtherModels, ModelOpener, OpenedModel
from mlcd.service.inference.model import InFlight


class Opener:
    """Opens models that take no time unless `may_open` is cleared; notes openings and closings."""

    def __init__(self, **sizes):
        self.sizes, self.events, self.fails = sizes, [], {}
        self.estimates, self.hanging = {}, set()
        self.may_open = asyncio.Event()
        self.may_open.set()

    async def estimate_bytes(self, name):
        return self.estimates.get(name, self.sizes[name])

    @asynccontextmanager
    async def open(self, name):
        await self.may_open.wait()
        if name in self.hanging:
            await asyncio.Event().wait()
        if name in self.fails:
            self.events.append(f"{name} fails")
            raise self.fails[name]
        self.events.append(f"{name} opens")
        model = SimpleNamespace(requests=InFlight())
        try:
            yield OpenedModel(model, None, None, lambda: self.sizes[name])
        finally:
            self.events.append(f"{name} closes")


def models(opener, *, memory_bytes=100, idle_s=60.0):
    return FurtherModels(
        [*opener.sizes],
        ModelOpener(opener.open, opener.estimate_bytes),
        memory_bytes=memory_bytes,
        idle_s=idle_s,
    )


def soon(seconds=5.0):
    return asyncio.get_running_loop().time() + seconds


async def use(further, name):
    """One request from begin to end."""
    _, end = await further.begin(name, deadline=soon())
    end()


async def test_concurrent_first_requests_share_one_opening():
    opener = Opener(a=1)
    opener.may_open.clear()
    async with models(opener) as further:
        requests = [asyncio.create_task(use(further, "a")) for _ in range(100)]
        late = asyncio.create_task(further.begin("a", deadline=soon(0.05)))
        with pytest.raises(Unavailable, match="the model a is being opened"):
            await late
        requests[0].cancel()  # its client has left
        opener.may_open.set()
        await asyncio.gather(*requests[1:])
        await use(further, "a")
        assert opener.events == ["a opens"]
    assert opener.events == ["a opens", "a closes"]


async def test_a_failed_opening_is_told_to_all_and_tried_again_later(monkeypatch):
    monkeypatch.setattr(further_models, "MODEL_RETRY_S", 0.1)
    opener = Opener(a=1)
    opener.fails["a"] = Unavailable("a is damaged")
    async with models(opener) as further:
        assert await further.is_ready("a")
        results = await asyncio.gather(
            *(use(further, "a") for _ in range(3)), return_exceptions=True
        )
        assert [str(error) for error in results] == ["a is damaged"] * 3
        with pytest.raises(Unavailable, match="a is damaged"):
            await use(further, "a")
        assert opener.events == ["a fails"]
        assert not await further.is_ready("a")
        opener.fails.clear()
        await asyncio.sleep(0.11)
        await use(further, "a")
        assert opener.events == ["a fails", "a opens"]


async def test_the_longest_unused_model_makes_room_and_those_in_use_stay():
    opener = Opener(a=40, b=40, c=40, d=101)
    async with models(opener) as further:
        await use(further, "a")
        await use(further, "b")
        await use(further, "a")
        await use(further, "c")
        assert opener.events == ["a opens", "b opens", "b closes", "c opens"]
        _, end_a = await further.begin("a", deadline=soon())
        _, end_c = await further.begin("c", deadline=soon())
        with pytest.raises(Unavailable, match="other models use the memory"):
            await use(further, "b")
        end_a()
        await use(further, "b")
        assert opener.events[4:] == ["a closes", "b opens"]
        end_c()
        with pytest.raises(
            Unavailable, match=r"the model d needs about .* MLCD_MODELS_MEMORY_BYTES"
        ):
            await use(further, "d")


async def test_a_model_that_grew_is_closed_for_the_next(monkeypatch):
    monkeypatch.setattr(further_models, "MODELS_POLL_S", 0.01)
    opener = Opener(a=40, b=40)
    async with models(opener) as further:
        await use(further, "a")
        opener.sizes["a"] = 70
        await asyncio.sleep(0.1)
        await use(further, "b")
        assert opener.events == ["a opens", "a closes", "b opens"]


async def test_only_a_model_without_requests_is_closed_when_idle():
    opener = Opener(a=1, b=1)
    async with models(opener, idle_s=0.05) as further:
        _, end = await further.begin("a", deadline=soon())
        await use(further, "b")
        await asyncio.sleep(0.3)
        assert opener.events == ["a opens", "b opens", "b closes"]
        end()
        await asyncio.sleep(0.3)
        assert opener.events[3:] == ["a closes"]
        await use(further, "b")
        assert opener.events[4:] == ["b opens"]


async def test_the_end_of_the_server_ends_an_opening():
    opener = Opener(a=1, b=1)
    async with models(opener) as further:
        await use(further, "a")
        opener.may_open.clear()
        waiting = asyncio.create_task(further.begin("b", deadline=soon(60)))
        await asyncio.sleep(0.01)
        waiting.cancel()
    assert opener.events == ["a opens", "a closes"]


async def test_an_opening_that_hangs_keeps_no_other_model_closed(monkeypatch):
    monkeypatch.setattr(further_models, "MODEL_OPEN_S", 0.2)
    opener = Opener(a=40, b=40)
    opener.hanging.add("a")
    async with models(opener) as further:
        hanging = asyncio.create_task(use(further, "a"))
        await asyncio.sleep(0.01)
        await use(further, "b")
        assert not hanging.done()
        with pytest.raises(Unavailable, match="the model a cannot be opened"):
            await hanging
        assert opener.events == ["b opens"]


@pytest.mark.parametrize("error", [OSError("/secret"), ArtifactInvalid("/secret is damaged")])
async def test_an_opening_that_fails_for_any_reason_is_tried_once_and_hides_paths(error):
    opener = Opener(a=1)
    opener.fails["a"] = error
    async with models(opener) as further:
        depths = []
        for _ in range(3):
            with pytest.raises(Unavailable, match="the model a cannot be opened") as refusal:
                await use(further, "a")
            assert "secret" not in str(refusal.value)
            assert refusal.value.headers == {"Retry-After": "5"}
            depths.append(len(refusal.traceback))
        assert depths[1] == depths[2]  # a shared error would keep the frames of all requests
        assert opener.events == ["a fails"]


async def test_a_model_beyond_its_estimate_makes_room_or_is_closed_again():
    opener = Opener(a=40, b=70, c=110)
    opener.estimates = {"b": 10, "c": 10}
    async with models(opener) as further:
        await use(further, "a")
        await use(further, "b")
        assert opener.events == ["a opens", "b opens", "a closes"]
        _, end = await further.begin("b", deadline=soon())
        with pytest.raises(Unavailable, match="the model c needs about"):
            await use(further, "c")
        assert opener.events[3:] == ["c opens", "c closes"]
        with pytest.raises(Unavailable, match="other models use the memory"):
            await use(further, "a")
        assert opener.events[5:] == []
        end()
        await use(further, "a")
        assert opener.events[5:] == ["b closes", "a opens"]


async def test_models_that_grow_beyond_the_budget_are_closed_when_idle(monkeypatch):
    monkeypatch.setattr(further_models, "MODELS_POLL_S", 0.01)
    opener = Opener(a=40, b=40)
    async with models(opener) as further:
        await use(further, "a")
        _, end = await further.begin("b", deadline=soon())
        opener.sizes["b"] = 70
        await asyncio.sleep(0.1)
        assert opener.events == ["a opens", "b opens", "a closes"]
        end()


async def test_an_engine_does_not_keep_the_context_of_the_first_request():
    variable, seen = ContextVar("variable", default="server"), []
    opener = Opener(a=1)

    async def estimate_bytes(name):
        seen.append(variable.get())
        return 1

    opener.estimate_bytes = estimate_bytes
    async with models(opener) as further:
        variable.set("request")
        await use(further, "a")
    assert seen == ["server"]
