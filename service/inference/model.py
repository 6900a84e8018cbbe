"""The served model with the parts that belong to it; a switch to another version replaces them."""

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
from service.inference.engine.supervised import SupervisedEngine
from service.inference.engine.triton import Direct, TritonEngine
from service.inference.model_data import ModelData
from service.inference.pipeline import Pipeline
from service.inference.readiness import Readiness
from service.inference.served import ServedEncoder
from service.settings import Settings
from service.telemetry.metrics import Metrics

# The share of the deadline that a batch may take: an image may wait for the batch that runs and for
# the one that is ready before its own is taken.
_BATCH_SHARE: Final = 0.25


class InFlight:
    """The number of requests in flight. Use from one event loop."""

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
        """Returns when no request is in flight."""
        await self._none.wait()


@dataclass(frozen=True)
class SharedResources:
    """The resources that every model of a process uses.

    large: threads for images that take seconds, apart from `decoders`. memory: the cache of
    embeddings; models have different keys in it. collections: those of all models; None without a
    state directory.
    """

    settings: Settings
    headers: ThreadPoolExecutor
    decoders: ThreadPoolExecutor
    large: ThreadPoolExecutor
    num_decoders: int
    admission: Admission
    metrics: Metrics
    memory: MemoryCache | None
    collections: Collections | None

    @property
    def decode_limits(self) -> DecodeLimits:
        limits = self.settings.limits
        return DecodeLimits(max_bytes=limits.max_body_bytes, max_pixels=limits.max_pixels)


@dataclass(frozen=True)
class ServedModel:
    """An engine, the way to it, and the data of its model. requests: those it answers now."""

    engine: Engine
    dispatcher: Dispatcher
    readiness: Readiness
    pipeline: Pipeline | CachedPipeline
    data: ModelData
    requests: InFlight = field(default_factory=InFlight)

    @property
    def encoder(self) -> ServedEncoder:
        return self.engine.served


@asynccontextmanager
async def open_model(
    engine: SupervisedEngine | TritonEngine, shared: SharedResources, data: ModelData
) -> AsyncIterator[ServedModel]:
    """Opens a model on an open engine, and warms it up."""
    async with AsyncExitStack() as stack:
        dispatcher = await stack.enter_async_context(
            _dispatching(engine, shared.settings, shared.metrics)
        )
        pipeline = Pipeline(
            engine,
            dispatcher,
            shared.admission,
            headers=shared.headers,
            decoders=shared.decoders,
            large=shared.large,
            num_decoders=shared.num_decoders,
            preprocess=engine.served.preprocess,
            dimension=engine.served.dimension,
            limits=shared.decode_limits,
            max_pixels=shared.settings.limits.pixels_of_one,
            metrics=shared.metrics,
        )
        await pipeline.warm_up()
        cached = await stack.enter_async_context(
            open_cached(
                pipeline,
                shared.settings,
                engine.served,
                shared.decode_limits,
                shared.metrics,
                shared.memory,
            )
        )
        yield ServedModel(engine, dispatcher, Readiness(engine, dispatcher), cached, data)


@asynccontextmanager
async def _dispatching(
    engine: SupervisedEngine | TritonEngine, settings: Settings, metrics: Metrics
) -> AsyncIterator[Dispatcher]:
    """Opens the way to an engine: Triton batches by itself, others have a micro-batcher."""
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
