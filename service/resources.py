"""The composition root: opens and closes the resources of a server or a worker, by the settings."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import open_artifact
from mlcd.collections.port import CollectionPort
from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command
from mlcd.service.fetch.fetcher import Fetcher
from mlcd.service.host.memory import resident_bytes, usable_memory_bytes
from mlcd.service.host.threads import ThreadBudget, forbid_tokenizer_threads, limit_blas
from mlcd.service.inference.admission import Admission, bound_retry_s
from mlcd.service.inference.cache.memory import MemoryCache
from mlcd.service.inference.contract import Dispatcher, Engine
from mlcd.service.inference.decoding_threads import DecodingThreads
from mlcd.service.inference.duplicate_searches import DuplicateSearches
from mlcd.service.inference.engine.blocking import IN_FLIGHT, open_blocking_encoder
from mlcd.service.inference.engine.opening import find_tokenizer
from mlcd.service.inference.engine.process import StartedEngine
from mlcd.service.inference.engine.supervised import SupervisedEngine
from mlcd.service.inference.engine.triton import TritonEngine, open_triton_engine, open_triton_texts
from mlcd.service.inference.find_model import (
    check_model_exists,
    estimate_engine_bytes,
    find_centers,
    find_model,
)
from mlcd.service.inference.further_models import FurtherModels, ModelOpener, OpenedModel
from mlcd.service.inference.joined_lookups import JoinedLookups
from mlcd.service.inference.lookup import Lookup
from mlcd.service.inference.model import (
    AnyEngine,
    OpenedTexts,
    ServedModel,
    SharedResources,
    open_model,
)
from mlcd.service.inference.model_data import (
    check_centers,
    open_collections,
    open_model_data,
)
from mlcd.service.inference.outcomes import Encoding
from mlcd.service.inference.readiness import Readiness
from mlcd.service.inference.served import EngineOptions, ServedEncoder
from mlcd.service.inference.served_texts import ServedTexts
from mlcd.service.inference.stored_names import StoredNames
from mlcd.service.inference.switch import ModelSwitch
from mlcd.service.inference.views import CollectionViews
from mlcd.service.jobs.batches import BatchStore
from mlcd.service.jobs.files import FileStore, open_files
from mlcd.service.jobs.queue import Queue
from mlcd.service.jobs.roots import Roots
from mlcd.service.jobs.service import JobService, open_job_service, open_jobs
from mlcd.service.jobs.webhook_sender import WebhookSender
from mlcd.service.jobs.webhooks import WebhookStore
from mlcd.service.keys.rates import RateLimiter, open_rate_limiter
from mlcd.service.keys.ring import KeyRing
from mlcd.service.keys.usage import UsageLedger, open_usage
from mlcd.service.settings import Settings
from mlcd.service.telemetry.metrics import Metrics
from mlcd.types import Fingerprint

if TYPE_CHECKING:  # only workers need the first, and the second is optional
    from mlcd.pipelines.shard import Equipment, OpenedCenters, ThumbnailChoice
    from mlcd.service.telemetry.tracing import RequestTracer


_NUM_WRITERS: Final = 16  # threads; they wait for the disk, and one sync serves all that wait


@dataclass(frozen=True)
class Resources:
    """The resources that routes use; a request uses one model throughout.

    further: models that a request may choose instead (`use_model`). compute: threads for search and
    writing, which are too slow for the event loop. lookups: label look-ups on them. parsing: one
    thread that parses JSON, because two concurrent parsers would delay the event loop twice as
    long. writing: threads for changes of collections, so that searches do not wait for the disk.
    duplicates: searches on a separate thread. rendering: threads that make thumbnails, shared
    fairly. views: clusters and layouts. opening: one thread for new collections. scraping: one
    thread for metrics of a store that may hang. keys: None if no key is needed. jobs: None without
    roots for jobs. batches: batches and files; None without a state directory. webhooks: None if no
    hosts are allowed for them, or without a state directory.
    """

    settings: Settings
    model: ServedModel
    further: FurtherModels
    switch: ModelSwitch
    admission: Admission
    compute: ThreadPoolExecutor
    lookups: JoinedLookups
    parsing: ThreadPoolExecutor
    writing: ThreadPoolExecutor
    duplicates: DuplicateSearches
    rendering: DecodingThreads
    views: CollectionViews
    opening: ThreadPoolExecutor
    scraping: ThreadPoolExecutor
    metrics: Metrics
    tracer: "RequestTracer | None"
    keys: KeyRing | None
    rate_limiter: RateLimiter
    usage: UsageLedger
    fetcher: Fetcher
    jobs: JobService | None
    batches: BatchStore | None
    webhooks: WebhookSender | None

    @property
    def engine(self) -> Engine:
        return self.model.engine

    @property
    def encoder(self) -> ServedEncoder:
        return self.model.encoder

    @property
    def dispatcher(self) -> Dispatcher:
        return self.model.dispatcher

    @property
    def pipeline(self) -> Encoding:
        return self.model.pipeline

    @property
    def texts(self) -> ServedTexts | None:
        """The text tower, None if the model has none."""
        return self.model.texts

    @property
    def readiness(self) -> Readiness:
        return self.model.readiness

    @property
    def lookup(self) -> Lookup | None:
        """The look-up of the centers, None without centers."""
        return self.model.data.lookup

    @property
    def centers(self) -> Centers | None:
        return None if self.lookup is None else self.lookup.centers

    @property
    def collections(self) -> dict[str, CollectionPort]:
        """The open collections of the model."""
        return self.model.data.collections

    @cached_property
    def stamp(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers of every response: the model, its preprocessing, the centers of label ids."""
        headers = {
            "x-mlcd-model": self.encoder.name,
            "x-mlcd-fingerprint": self.encoder.fingerprint,
            "x-mlcd-preprocess-version": str(self.encoder.preprocess.version),
            **({} if self.centers is None else {"x-mlcd-centers": self.centers.digest}),
        }
        return tuple((name.encode(), value.encode("latin-1")) for name, value in headers.items())

    @property
    def retry_after_s(self) -> int:
        """The seconds, an integer from 1 to 30, after which a refused client should retry."""
        return (
            self.admission.retry_after_s if self.engine.up else bound_retry_s(self.engine.back_in_s)
        )


@dataclass(frozen=True)
class WorkerResources:
    """The resources for tasks of jobs.

    computing: pool of the one thread that opened the equipment and may use it.
    """

    queue: Queue
    roots: Roots
    files: FileStore | None
    equipment: "Equipment"
    computing: ThreadPoolExecutor


@asynccontextmanager
async def open_resources(
    settings: Settings,
    folder: str,
    *,
    multiprocess_dir: Path | None = None,
    started: StartedEngine | None = None,
    texts: StartedEngine | None = None,
) -> AsyncIterator[Resources]:
    """Opens model, centers and collections; raises ConfigInvalid for centers of another model.

    folder: result of `find_model`. multiprocess_dir: see `Metrics`. started, texts: started
    processes of the image and text engines; None starts them.
    """
    async with AsyncExitStack() as stack:
        # This frame must not refer to the model, so that a switch can free it.
        yield await _open_all(stack, settings, folder, multiprocess_dir, started, texts)


async def _open_all(
    stack: AsyncExitStack,
    settings: Settings,
    folder: str,
    multiprocess_dir: Path | None,
    started: StartedEngine | None,
    started_texts: StartedEngine | None,
) -> Resources:
    """Opens the resources; `stack` closes them."""
    # Checks that may fail come before the model, which takes a while to load.
    await asyncio.to_thread(_check_redis, settings)
    keys = None if settings.auth.keys_file is None else KeyRing(Path(settings.auth.keys_file))
    threads = _limit_threads(settings)
    limits = settings.limits
    collections = open_collections(settings)
    if collections is not None:
        # Closed last, without finishing an index, which could take longer than the shutdown may.
        stack.callback(collections.close, finish=False)
    headers = _open_pool(stack, 1, "headers")
    decoders = _open_pool(stack, threads.decode, "decode")
    large = _open_pool(stack, max(1, threads.decode // 2), "large")
    compute = _open_pool(stack, threads.compute, "compute")
    parsing = _open_pool(stack, 1, "parse")
    tokenizing = _open_pool(stack, 1, "tokenize")
    writing = _open_pool(stack, _NUM_WRITERS, "write")
    comparing = _open_pool(stack, 1, "compare")
    opening = _open_pool(stack, 1, "open")
    scraping = _open_pool(stack, 1, "scrape")
    rendering = DecodingThreads(_open_pool(stack, threads.decode, "render"))
    # A separate stack for the model: a switch closes it, while all other resources stay open.
    model_stack = await stack.enter_async_context(AsyncExitStack())
    engine = await model_stack.enter_async_context(_open_engine(settings, folder, threads, started))
    encoder = engine.served
    assert isinstance(encoder, ServedEncoder)
    metrics = Metrics(**encoder.labels, multiprocess_dir=multiprocess_dir)
    tracer = _open_tracer(stack, settings, encoder)
    _observe(metrics, engine, threads)
    admission = Admission.of(limits, metrics)
    shared = SharedResources(
        settings=settings,
        headers=headers,
        decoders=decoders,
        large=large,
        tokenizing=tokenizing,
        num_decoders=threads.decode,
        admission=admission,
        metrics=metrics,
        memory=MemoryCache(settings.cache.memory_bytes, metrics)
        if settings.cache.memory_bytes
        else None,
        collections=collections,
    )
    if collections is not None:
        metrics.collections(collections.all, collections.unusable)
    data = open_model_data(settings, folder, collections, encoder.fingerprint, strict=True)
    texts = await _open_texts(model_stack, settings, folder, threads, engine, started_texts)
    if texts is not None:
        texts.engine.observe(metrics.of_texts)
    model = await model_stack.enter_async_context(open_model(engine, texts, shared, data))
    await stack.enter_async_context(_run_task(metrics.watch()))
    if keys is not None:
        await stack.enter_async_context(_run_task(keys.watch()))
    redis_url = None if settings.redis_url is None else settings.redis_url.get_secret_value()
    rate_limiter = await stack.enter_async_context(
        open_rate_limiter(redis_url, metrics=metrics, keyed=keys is not None)
    )
    usage = await stack.enter_async_context(
        open_usage(redis_url, _find_writable_state(settings), keep_days=settings.usage.keep_days)
    )
    fetcher = await stack.enter_async_context(Fetcher(settings.fetch, limits, metrics))
    jobs = await stack.enter_async_context(open_job_service(settings))
    if jobs is not None:
        await stack.enter_async_context(_run_task(jobs.count(metrics)))
    batches = _open_batches(stack, settings)
    webhooks = await _open_webhooks(stack, settings, batches, jobs, keys, metrics)
    further = await stack.enter_async_context(
        _open_further_models(settings, shared, threads, encoder.name)
    )
    switch = await stack.enter_async_context(ModelSwitch(shared, folder, model, model_stack))
    metrics.names_damaged(lambda: switch.has_damaged_names)
    return Resources(
        settings=settings,
        model=model,
        further=further,
        switch=switch,
        admission=admission,
        compute=compute,
        lookups=JoinedLookups(compute),
        parsing=parsing,
        writing=writing,
        duplicates=DuplicateSearches(comparing, metrics),
        rendering=rendering,
        views=CollectionViews(_open_pool(stack, 1, "views")),
        opening=opening,
        scraping=scraping,
        metrics=metrics,
        tracer=tracer,
        keys=keys,
        rate_limiter=rate_limiter,
        usage=usage,
        fetcher=fetcher,
        jobs=jobs,
        batches=batches,
        webhooks=webhooks,
    )


def _observe(metrics: Metrics, engine: AnyEngine, threads: ThreadBudget) -> None:
    for pool, num in threads.as_dict().items():
        metrics.threads(pool, num)
    engine.observe(metrics)


def _open_further_models(
    settings: Settings, shared: SharedResources, threads: ThreadBudget, served_name: str
) -> FurtherModels:
    """Returns the models of MLCD_MODELS, each closed.

    Raises NotFound for a missing path, ConfigInvalid for a model named as the served one.
    """
    if served_name in settings.further_models:
        raise ConfigInvalid(
            f"MLCD_MODELS must not use the name of MLCD_MODEL, {served_name}",
            remedy="give the further model another name",
        )
    of_model = {
        name: settings.model_copy(update={"model": spec, "centers": None, "approximate": False})
        for name, spec in settings.further_models.items()
    }
    for own in of_model.values():
        check_model_exists(own)

    async def estimate_bytes(name: str) -> int:
        return await asyncio.to_thread(estimate_engine_bytes, of_model[name])

    @asynccontextmanager
    async def open_further(name: str) -> AsyncIterator[OpenedModel]:
        own = of_model[name]
        folder = await asyncio.to_thread(find_model, own)
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(_open_engine(own, folder, threads, None))
            assert isinstance(engine, SupervisedEngine)
            assert isinstance(engine.served, ServedEncoder)
            encoder = replace(engine.served, name=name)
            metrics = Metrics(**encoder.labels, multiprocess_dir=None)
            engine.observe(metrics)
            data = await asyncio.to_thread(
                open_model_data, own, folder, None, encoder.fingerprint, strict=True
            )
            texts = await _open_texts(stack, own, folder, threads, engine, None)
            engines = [engine]
            if texts is not None:
                assert isinstance(texts.engine, SupervisedEngine)
                texts.engine.observe(metrics.of_texts)
                engines.append(texts.engine)
            admission = Admission.of(own.limits, metrics)
            parts = replace(shared, settings=own, admission=admission, metrics=metrics)
            model = await stack.enter_async_context(open_model(engine, texts, parts, data))
            yield OpenedModel(
                replace(model, encoder=encoder),
                admission,
                metrics,
                lambda: sum(resident_bytes(each.pid) for each in engines),
            )

    memory_bytes = settings.models_memory_bytes or usable_memory_bytes() // 2
    opener = ModelOpener(open_further, estimate_bytes)
    return FurtherModels(
        [*of_model], opener, memory_bytes=memory_bytes, idle_s=settings.models_idle_s
    )


def _find_writable_state(settings: Settings) -> Path | None:
    """Returns the state directory; None without one, or where the server can only read it."""
    if settings.state_dir is None:
        return None
    state = Path(settings.state_dir)
    return None if state.exists() and not os.access(state, os.W_OK) else state


def _open_batches(stack: AsyncExitStack, settings: Settings) -> BatchStore | None:
    files = open_files(settings)
    if files is None:
        return None
    stack.callback(files.close)
    return BatchStore(files)


async def _open_webhooks(
    stack: AsyncExitStack,
    settings: Settings,
    batches: BatchStore | None,
    jobs: JobService | None,
    keys: KeyRing | None,
    metrics: Metrics,
) -> WebhookSender | None:
    if batches is None or not settings.webhooks.allow:
        return None
    sender = WebhookSender(
        WebhookStore(batches.files),
        settings.webhooks,
        metrics,
        queue=None if jobs is None else jobs.queue,
        check_owner=(lambda _: None) if keys is None else keys.find,
    )
    await stack.enter_async_context(sender)
    await stack.enter_async_context(_run_task(sender.run()))
    return sender


@contextmanager
def open_worker_resources(
    settings: Settings, announce: Callable[[str], None]
) -> Iterator[WorkerResources]:
    """Opens the queue, the model and its centers. announce: called with a message before an export.

    Raises the errors of opening them, and ConfigInvalid for centers of another model.
    """
    _check_redis(settings)
    with ExitStack() as stack:
        queue, roots = stack.enter_context(open_jobs(settings))
        computing = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="compute"))
        context = _open_equipment(settings, announce)
        equipment = computing.submit(context.__enter__).result()
        stack.callback(lambda: computing.submit(context.__exit__, None, None, None).result())
        files = open_files(settings)
        if files is not None:
            stack.callback(files.close)
        yield WorkerResources(queue, roots, files, equipment, computing)


@contextmanager
def _open_equipment(settings: Settings, announce: Callable[[str], None]) -> Iterator["Equipment"]:
    """Opens the model and its centers for tasks of jobs; enter it in the thread of the tasks.

    announce: called with a message before an export. Raises the errors of opening them.
    """
    from mlcd.pipelines.shard import Equipment

    threads = _limit_threads(settings)
    folder = find_model(settings, announce)
    with open_blocking_encoder(settings, folder, num_threads=threads.engine) as encoder:
        yield Equipment(
            encoder,
            _open_centers(settings, folder, encoder.fingerprint),
            num_threads=threads.decode,
            in_flight=IN_FLIGHT if settings.engine == "triton" else 1,
            thumbnails=_choose_thumbnails(settings),
            urls=settings.fetch.url_options,
        )


def _choose_thumbnails(settings: Settings) -> "ThumbnailChoice | None":
    from mlcd.pipelines.shard import ThumbnailChoice

    thumbnails = settings.thumbnails
    return ThumbnailChoice(thumbnails.side, thumbnails.max_bytes) if thumbnails.enabled else None


def _open_centers(
    settings: Settings, folder: str, fingerprint: Fingerprint
) -> "OpenedCenters | None":
    from mlcd.pipelines.shard import OpenedCenters

    if (path := find_centers(settings, folder)) is None:
        return None
    artifact = open_artifact(path, "centers")
    centers = Centers.read(artifact, with_names=False)
    check_centers(path, centers, fingerprint)
    state_dir = None if settings.state_dir is None else Path(settings.state_dir)
    names = StoredNames(artifact, state_dir).read().names.names
    return OpenedCenters(artifact, replace(centers, names=names if any(names) else None))


def _limit_threads(settings: Settings) -> ThreadBudget:
    """Divides the cores, and limits the threads of matrix products in this process."""
    threads = ThreadBudget.of(settings)
    limit_blas(threads.blas)
    forbid_tokenizer_threads()
    return threads


def _open_engine(
    settings: Settings, model: str, threads: ThreadBudget, started: StartedEngine | None
) -> AbstractAsyncContextManager[AnyEngine]:
    if settings.engine == "triton":
        return open_triton_engine(settings)
    options = EngineOptions.from_settings(settings, model, num_threads=threads.engine)
    return SupervisedEngine(options, batch_timeout_s=settings.batch_timeout_s, started=started)


async def _open_texts(
    stack: AsyncExitStack,
    settings: Settings,
    model: str,
    threads: ThreadBudget,
    images: AnyEngine,
    started: StartedEngine | None,
) -> OpenedTexts | None:
    """Opens the text tower in a separate process, or in Triton; None without a text tower."""
    if isinstance(images, TritonEngine):
        if settings.triton.text is None:
            return None
        return OpenedTexts(*await stack.enter_async_context(open_triton_texts(settings, images)))
    tokenizer = await asyncio.to_thread(find_tokenizer, model)
    if tokenizer is None:
        return None
    options = EngineOptions.from_settings(
        settings, model, num_threads=threads.engine, tower="texts"
    )
    engine = await stack.enter_async_context(
        SupervisedEngine(options, batch_timeout_s=settings.batch_timeout_s, started=started)
    )
    return OpenedTexts(engine, tokenizer)


def _check_redis(settings: Settings) -> None:
    if settings.redis_url is None:
        return
    try:
        from mlcd.service.redis_clients import refuse_unsupported_redis
    except ModuleNotFoundError as error:
        raise ConfigInvalid(
            "MLCD_REDIS_URL needs the package redis", remedy=install_command("redis")
        ) from error
    refuse_unsupported_redis(settings.redis_url.get_secret_value())


def _open_tracer(
    stack: AsyncExitStack, settings: Settings, encoder: ServedEncoder
) -> "RequestTracer | None":
    if settings.tracing.endpoint is None:
        return None
    try:
        from mlcd.service.telemetry.tracing import RequestTracer
    except ModuleNotFoundError as error:
        raise ConfigInvalid(
            "tracing needs packages that are not installed", remedy=install_command("tracing")
        ) from error
    tracer = RequestTracer(
        settings.tracing.endpoint,
        sample=settings.tracing.sample,
        model=encoder.name,
    )
    stack.callback(tracer.close)
    return tracer


def _open_pool(stack: AsyncExitStack, num_threads: int, name: str) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    return pool


@asynccontextmanager
async def _run_task(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
