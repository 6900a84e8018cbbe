"""The served model with its parts, which a switch to another version replaces."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from mlcd.collections.port import CollectionsPort
from mlcd.images.decode import DecodeLimits
from mlcd.models.tokenizer import Tokenizer
from mlcd.service.inference.admission import Admission
from mlcd.service.inference.batcher import MicroBatcher
from mlcd.service.inference.cache.cached import open_cache
from mlcd.service.inference.cache.keyspace import KeySpace
from mlcd.service.inference.cache.memory import MemoryCache
from mlcd.service.inference.contract import Dispatcher, Engine
from mlcd.service.inference.engine.supervised import SupervisedEngine
from mlcd.service.inference.engine.triton import Direct, TritonEngine
from mlcd.service.inference.model_data import ModelData
from mlcd.service.inference.outcomes import Encoding
from mlcd.service.inference.pipeline import Pipeline
from mlcd.service.inference.readiness import Readiness, ReadinessProbe
from mlcd.service.inference.served import ServedEncoder
from mlcd.service.inference.served_texts import ServedTexts, new_text_tower
from mlcd.service.settings import Settings
from mlcd.service.telemetry.metrics import Metrics
from mlcd.service.telemetry.text_metrics import TowerMetrics

# The fraction of the deadline that a batch may take: an image may have to wait for the running
# batch and for the next batch before its own.
_BATCH_SHARE: Final = 0.25
AnyEngine: TypeAlias = SupervisedEngine | TritonEngine


class InFlight:
    """The number of requests in flight. Use from one event loop."""

    def __init__(self) -> None:
        self._num = 0
        self._none = asyncio.Event()
        self._none.set()

    @property
    def num(self) -> int:
        return self._num

    def begin(self) -> None:
        self._num += 1
        self._none.clear()

    def end(self) -> None:
        self._num -= 1
        if not self._num:
            self._none.set()

    async def wait_for_none(self) -> None:
        """Waits until no request is in flight."""
        await self._none.wait()


@dataclass(frozen=True)
class SharedResources:
    """The resources that every model of a process uses.

    headers: threads that read headers of images. decoders: threads that decode images, except
    images that take seconds, for which there is `large`. tokenizing: a pool of one thread that
    tokenizes texts. memory: cache of the embeddings of all models. collections: collections of all
    models; None without a state directory.
    """

    settings: Settings
    headers: ThreadPoolExecutor
    decoders: ThreadPoolExecutor
    large: ThreadPoolExecutor
    tokenizing: ThreadPoolExecutor
    num_decoders: int
    admission: Admission
    metrics: Metrics
    memory: MemoryCache | None
    collections: CollectionsPort | None

    @property
    def decode_limits(self) -> DecodeLimits:
        limits = self.settings.limits
        return DecodeLimits(max_bytes=limits.max_body_bytes, max_pixels=limits.max_pixels)


@dataclass(frozen=True)
class ServedModel:
    """An engine, its dispatcher and pipeline, and the data of its model.

    texts: the model's text tower, None if it embeds only images. requests: its requests in flight.
    """

    engine: Engine
    encoder: ServedEncoder
    dispatcher: Dispatcher
    readiness: Readiness
    pipeline: Encoding
    texts: ServedTexts | None
    data: ModelData
    requests: InFlight = field(default_factory=InFlight)


@dataclass(frozen=True)
class OpenedTexts:
    """The open engine of a text tower, and its tokenizer."""

    engine: AnyEngine
    tokenizer: Tokenizer


@asynccontextmanager
async def open_model(
    engine: AnyEngine, texts: OpenedTexts | None, shared: SharedResources, data: ModelData
) -> AsyncIterator[ServedModel]:
    """Opens a model on its open engines, and warms it up."""
    encoder, settings, metrics = engine.served, shared.settings, shared.metrics
    assert isinstance(encoder, ServedEncoder)
    async with AsyncExitStack() as stack:
        dispatcher = await stack.enter_async_context(
            _open_dispatcher(engine, settings, metrics, "images", settings.limits.max_queued_images)
        )
        images = Pipeline(
            engine,
            dispatcher,
            shared.admission,
            headers=shared.headers,
            decoders=shared.decoders,
            large=shared.large,
            num_decoders=shared.num_decoders,
            preprocess=encoder.preprocess,
            dimension=encoder.dimension,
            limits=shared.decode_limits,
            max_pixels=settings.limits.max_request_pixels,
            metrics=metrics,
        )
        await images.warm_up()
        cache = await stack.enter_async_context(
            open_cache(settings, encoder, metrics, shared.memory)
        )
        if cache is None:
            pipeline: Encoding = images
        else:
            space = KeySpace.of_images(encoder, cache.vectors, shared.decode_limits)
            pipeline = cache.before(images, space)
        tower = None
        if texts is not None:
            tower = new_text_tower(
                texts.engine,
                await stack.enter_async_context(
                    _open_dispatcher(
                        texts.engine,
                        settings,
                        metrics.of_texts,
                        "texts",
                        settings.limits.max_queued_texts,
                    )
                ),
                texts.tokenizer,
                places=shared.admission.texts,
                cache=cache,
                thread=shared.tokenizing,
                limits=settings.limits,
                metrics=metrics.of_texts,
            )
        probe = ReadinessProbe(engine, dispatcher, np.zeros(encoder.item.shape, encoder.item.dtype))
        readiness = Readiness(probe) if tower is None else Readiness(probe, tower.probe)
        yield ServedModel(engine, encoder, dispatcher, readiness, pipeline, tower, data)


@asynccontextmanager
async def _open_dispatcher(
    engine: AnyEngine, settings: Settings, metrics: TowerMetrics, item_kind: str, max_queued: int
) -> AsyncIterator[Dispatcher]:
    """Opens the dispatcher of an engine: Triton batches itself, others get a micro-batcher.

    item_kind: name of the items. max_queued: limit of items in the queue.
    """
    if isinstance(engine, TritonEngine):
        yield Direct(engine, timeout_s=settings.triton.timeout_s, metrics=metrics)
        return
    batcher = MicroBatcher(
        engine,
        max_batch=engine.served.batch_within(settings.limits.deadline_s * _BATCH_SHARE),
        max_queued=max_queued,
        metrics=metrics,
        item_kind=item_kind,
    )
    async with batcher:
        yield batcher
