"""The model that is served, and all that stands and falls with it: one of them after the other where it is swapped."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from mlcd.collections.store import Collections
from mlcd.images.decode import DecodeLimits
from service.inference.admission import Admission
from service.inference.batcher import MicroBatcher
from service.inference.cache.cached import CachedPipeline, open_cached
from service.inference.cache.memory import MemoryCache
from service.inference.contract import Dispatcher, Engine
from service.inference.engine.served import ServedEncoder
from service.inference.engine.supervised import SupervisedEngine
from service.inference.engine.triton import Direct, TritonEngine
from service.inference.pipeline import Pipeline
from service.inference.readiness import Readiness
from service.inference.space import Space
from service.settings import Settings
from service.telemetry.metrics import Metrics

_BATCH_SHARE: Final = 0.25
"""Of the deadline: an image may wait for the batch that runs and the one that is ready before its own is taken."""


class InFlight:
    """Counts them; use from one event loop."""

    def __init__(self) -> None:
        self._num = 0
        self._none = asyncio.Event()
        self._none.set()

    def began(self) -> None:
        self._num += 1
        self._none.clear()

    def ended(self) -> None:
        self._num -= 1
        if not self._num:
            self._none.set()

    async def none(self) -> None:
        """Until there are none."""
        await self._none.wait()


@dataclass(frozen=True)
class Ground:
    """What every model of a process stands on."""

    settings: Settings
    headers: ThreadPoolExecutor
    decoders: ThreadPoolExecutor
    large: ThreadPoolExecutor
    """For pictures that take seconds, apart from `decoders`."""
    num_decoders: int
    admission: Admission
    metrics: Metrics
    memory: MemoryCache | None
    """Of vectors; one for all models, whose keys differ."""
    collections: Collections | None
    """Of all models; None without a place for them."""

    @property
    def decode_limits(self) -> DecodeLimits:
        limits = self.settings.limits
        return DecodeLimits(max_bytes=limits.max_body_bytes, max_pixels=limits.max_pixels)


@dataclass(frozen=True)
class ServedModel:
    """An engine, the way to it, and what was made of its vectors."""

    engine: Engine
    dispatcher: Dispatcher
    readiness: Readiness
    pipeline: Pipeline | CachedPipeline
    space: Space
    requests: InFlight = field(default_factory=InFlight)
    """That are answered by this model."""

    @property
    def encoder(self) -> ServedEncoder:
        return self.engine.served


@asynccontextmanager
async def open_model(
    engine: SupervisedEngine | TritonEngine, ground: Ground, space: Space
) -> AsyncIterator[ServedModel]:
    """A model on an open engine, warmed up."""
    async with AsyncExitStack() as stack:
        dispatcher = await stack.enter_async_context(
            _dispatching(engine, ground.settings, ground.metrics)
        )
        pipeline = Pipeline(
            engine,
            dispatcher,
            ground.admission,
            headers=ground.headers,
            decoders=ground.decoders,
            large=ground.large,
            num_decoders=ground.num_decoders,
            preprocess=engine.served.preprocess,
            dimension=engine.served.dimension,
            limits=ground.decode_limits,
            max_pixels=ground.settings.limits.pixels_of_one,
            metrics=ground.metrics,
        )
        await pipeline.warm_up()
        cached = await stack.enter_async_context(
            open_cached(
                pipeline,
                ground.settings,
                engine.served,
                ground.decode_limits,
                ground.metrics,
                ground.memory,
            )
        )
        yield ServedModel(engine, dispatcher, Readiness(engine, dispatcher), cached, space)


@asynccontextmanager
async def _dispatching(
    engine: SupervisedEngine | TritonEngine, settings: Settings, metrics: Metrics
) -> AsyncIterator[Dispatcher]:
    """Triton batches by itself; any other engine sits behind one micro-batcher."""
    if isinstance(engine, TritonEngine):
        yield Direct(engine, timeout_s=settings.triton.timeout_s, metrics=metrics)
        return
    limits = settings.limits
    batcher = MicroBatcher(
        engine,
        max_batch=engine.served.batch_within(limits.deadline_s * _BATCH_SHARE),
        max_queued=limits.max_queued_images,
        metrics=metrics,
    )
    async with batcher:
        yield batcher
