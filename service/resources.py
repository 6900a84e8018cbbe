"""Settings to open resources: the one composition root of the service, closed in reverse."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mlcd.artifact import MANIFEST
from mlcd.clustering.centers import Centers
from mlcd.collections.snapshot import Snapshot
from mlcd.cores import available_cores
from mlcd.errors import ConfigInvalid
from mlcd.images.decode import DecodeLimits
from mlcd.pipelines.resolve import resolve_model
from service.dispatch.admission import Admission, bounded_retry_s
from service.dispatch.batcher import MicroBatcher
from service.dispatch.engine import SupervisedEngine
from service.dispatch.pipeline import Pipeline
from service.dispatch.readiness import Readiness
from service.dispatch.served import Opening, ServedEncoder
from service.lookup import Lookup
from service.observability.metrics import Metrics
from service.settings import Settings

_BATCH_SHARE: Final = 0.25
"""Of the deadline: an image may wait for the batch that runs and the one that is ready before its own is taken."""


@dataclass(frozen=True)
class Resources:
    """What the routes work with."""

    settings: Settings
    encoder: ServedEncoder
    centers: Centers | None
    lookup: Lookup | None
    """Of the centers."""
    collections: dict[str, Snapshot]
    engine: SupervisedEngine
    admission: Admission
    batcher: MicroBatcher
    readiness: Readiness
    pipeline: Pipeline
    compute: ThreadPoolExecutor
    """For label look-up and search, which are too long for the event loop."""
    metrics: Metrics

    @property
    def retry_after_s(self) -> int:
        """When a client that is refused now should come back: whole seconds, 1 to 30."""
        return self.admission.retry_after_s if self.engine.up else bounded_retry_s(self.engine.back_in_s)


@asynccontextmanager
async def open_resources(
    settings: Settings, announce: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Resources]:
    """Open model, centers and collections; refuse those of another fingerprint.

    announce: told when weights are exported first, which takes a while.
    """
    model = settings.model if settings.engine == "fake" else resolve_model(settings.model, announce)
    opening = Opening(
        model,
        max_batch=settings.max_batch,
        precision=settings.precision,
        engine=settings.engine,
        num_threads=settings.engine_threads,
        exif=settings.exif,
        decode=settings.decode,
    )
    num_cores = available_cores()
    num_decoders = settings.decode_threads or num_cores
    limits = settings.limits
    async with AsyncExitStack() as stack:
        headers = _open_pool(stack, 1, "headers")
        decoders = _open_pool(stack, num_decoders, "decode")
        compute = _open_pool(stack, num_cores, "compute")
        engine = await stack.enter_async_context(SupervisedEngine(opening, batch_timeout_s=settings.batch_timeout_s))
        encoder = engine.served
        metrics = Metrics(
            model=encoder.name, fingerprint=encoder.fingerprint, engine=encoder.engine, precision=encoder.precision
        )
        engine.observe(metrics)
        admission = Admission(
            max_images=limits.max_queued_images,
            max_pixels=limits.max_queued_pixels,
            max_bytes=limits.max_queued_bytes,
            metrics=metrics,
        )
        batcher = MicroBatcher(
            engine,
            max_batch=encoder.batch_within(limits.deadline_s * _BATCH_SHARE),
            max_queued=limits.max_queued_images,
            metrics=metrics,
        )
        pipeline = Pipeline(
            engine,
            batcher,
            admission,
            headers=headers,
            decoders=decoders,
            num_decoders=num_decoders,
            preprocess=encoder.preprocess,
            dimension=encoder.dimension,
            limits=DecodeLimits(max_bytes=limits.max_body_bytes, max_pixels=limits.max_pixels),
            max_pixels=limits.max_queued_pixels,
            metrics=metrics,
        )
        await pipeline.warm_up()
        centers = _open_centers(settings, model, encoder)
        lookup = None if centers is None else Lookup(centers)
        collections = _open_collections(settings, encoder)
        if settings.approximate and lookup is not None:
            lookup.approximate(collections.values())
        await stack.enter_async_context(batcher)
        await stack.enter_async_context(_running(metrics.watch_loop()))
        yield Resources(
            settings=settings,
            encoder=encoder,
            centers=centers,
            lookup=lookup,
            collections=collections,
            engine=engine,
            admission=admission,
            batcher=batcher,
            readiness=Readiness(engine, batcher),
            pipeline=pipeline,
            compute=compute,
            metrics=metrics,
        )


def _open_pool(stack: AsyncExitStack, num_threads: int, name: str) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    return pool


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _open_centers(settings: Settings, model: str, encoder: ServedEncoder) -> Centers | None:
    shipped = Path(model) / "centers"
    if settings.centers is None and not (shipped / MANIFEST).is_file():
        return None
    path = Path(settings.centers) if settings.centers is not None else shipped
    centers = Centers.open(path)
    if centers.fingerprint != encoder.fingerprint:
        raise ConfigInvalid(
            f"the centers {path} are in the space of another model ({centers.fingerprint[:12]}, served"
            f" {encoder.fingerprint[:12]})",
            remedy="use the centers shipped with the model, or cluster its own embeddings",
        )
    return centers


def _open_collections(settings: Settings, encoder: ServedEncoder) -> dict[str, Snapshot]:
    if settings.state_dir is None:
        return {}
    folder = Path(settings.state_dir) / "collections"
    collections = {}
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        snapshot = Snapshot.open(manifest.parent)
        snapshot.check_fingerprint(encoder.fingerprint)
        collections[manifest.parent.name] = snapshot
    return collections
