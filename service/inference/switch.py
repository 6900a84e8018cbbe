"""From one version of the model to another while requests are being answered."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from contextvars import Context
from functools import partial
from types import TracebackType
from typing import Self

from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    Conflict,
    DeadlineExceeded,
    MlcdError,
    Unavailable,
)
from service.host.allocator import keep_what_is_open
from service.inference.engine.served import ServedEncoder
from service.inference.engine.triton import TritonEngine, open_triton_engine
from service.inference.model import Ground, ServedModel, open_model
from service.inference.space import open_space
from service.timings import RETIREMENT_S

_log = logging.getLogger("mlcd.service")


class Swap:
    """One swap at a time. Use as an async context manager, which ends one that is under way and closes what it opened.

    A request sees one model from its first byte to its answer. The model before is closed when its requests have
    ended, and only then Triton is told to let go of it.
    """

    def __init__(
        self, ground: Ground, folder: str, model: ServedModel, opened: AsyncExitStack
    ) -> None:
        """folder: where centers may lie beside the model. opened: closes `model`, and may do so twice."""
        self._ground, self._folder = ground, folder
        self._model, self._opened = model, opened
        self._loading: asyncio.Task[int] | None = None
        self._retiring: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in (self._loading, self._retiring):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._opened.aclose()

    async def load(
        self,
        version: int | None,
        *,
        unload: bool,
        publish: Callable[[ServedModel], None],
        deadline: float,
    ) -> int:
        """Serve `version` (None: the newest in Triton's repository) by `publish`; its number. On any error the one
        before goes on.

        unload: have Triton let go of every other version afterwards. deadline: of the caller's wait, by the loop's
        clock; the swap itself goes on after it.
        Raises Conflict where this server cannot swap, where a swap is under way or where the version does not fit,
        NotFound for a version that is not there, Unavailable, DeadlineExceeded.
        """
        if not isinstance(self._model.engine, TritonEngine):
            raise Conflict(
                f"the engine {self._model.encoder.engine} serves what it was started with",
                remedy="start the server with the other model, or with MLCD_ENGINE=triton",
            )
        if self._ground.settings.processes > 1:
            raise Conflict(
                "several processes cannot change their model at one moment",
                remedy="restart the server",
            )
        if self._loading is not None and not self._loading.done():
            raise Conflict(
                "another version is being loaded",
                remedy="wait until /v1/info says that it is served",
            )
        work = self._load(self._model.engine, version, unload=unload, publish=publish)
        # Of no request in particular: it may outlive the one that asked for it.
        self._loading = asyncio.create_task(work, name="model-swap", context=Context())
        self._loading.add_done_callback(_tell)
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(self._loading)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the version is not loaded yet",
                remedy="it goes on: /v1/info says when it is served",
            ) from error

    async def _load(
        self,
        engine: TritonEngine,
        version: int | None,
        *,
        unload: bool,
        publish: Callable[[ServedModel], None],
    ) -> int:
        if self._retiring is not None:
            await asyncio.wait([self._retiring])
        try:
            number = await engine.load_beside(version)
            async with AsyncExitStack() as stack:
                later = await stack.enter_async_context(
                    open_triton_engine(self._ground.settings, version=number)
                )
                _check_shape(engine.served, later.served)
                ground = self._ground
                opening = partial(
                    open_space, ground.settings, self._folder, ground.collections, strict=False
                )
                space = await asyncio.to_thread(opening, later.served.fingerprint)
                model = await stack.enter_async_context(open_model(later, self._ground, space))
                if self._model.readiness.draining:
                    raise Unavailable("the server is stopping")
                self._flip(model, stack.pop_all(), publish, unload=unload)
        except (
            ArtifactInvalid,
            ConfigInvalid,
        ) as error:  # faults of what was asked for, not of this server
            raise Conflict(error.message, remedy=error.remedy) from error
        return number

    def _flip(
        self,
        model: ServedModel,
        opened: AsyncExitStack,
        publish: Callable[[ServedModel], None],
        *,
        unload: bool,
    ) -> None:
        former, to_close = self._model, self._opened
        self._model, self._opened = model, opened
        self._ground.metrics.serve(**model.encoder.labels)
        model.engine.observe(self._ground.metrics)
        publish(model)
        _log.info("another version is served: %s", model.encoder.fingerprint)
        retiring = self._retire(former, to_close, model, unload=unload)
        self._retiring = asyncio.create_task(retiring, name="model-retirement", context=Context())
        self._retiring.add_done_callback(
            lambda _: keep_what_is_open()
        )  # its centers may be gigabytes

    async def _retire(
        self, former: ServedModel, opened: AsyncExitStack, model: ServedModel, *, unload: bool
    ) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ground.settings.limits.deadline_s + RETIREMENT_S):
                    await former.requests.none()
        finally:
            await opened.aclose()
        if unload:
            assert isinstance(model.engine, TritonEngine)
            try:
                await model.engine.unload_others()
            except MlcdError as error:
                _log.warning("Triton keeps the version before loaded: %s", error)


def _check_shape(former: ServedEncoder, later: ServedEncoder) -> None:
    shapes = [(served.dimension, served.preprocess.crop) for served in (former, later)]
    if shapes[0] != shapes[1]:
        (dimension, side), (other_dimension, other_side) = shapes
        raise Conflict(
            f"that version gives {other_dimension} numbers of {other_side} x {other_side} pixels, the one that is"
            f" served {dimension} of {side} x {side}",
            remedy="start a server with it",
        )


def _tell(loading: "asyncio.Task[int]") -> None:
    """To the log, whether or not somebody still waits for it."""
    if loading.cancelled():
        return
    error = loading.exception()
    if error is not None and not isinstance(error, MlcdError):
        _log.error("a model's version could not be loaded: %s", type(error).__name__)
    elif error is not None:
        _log.warning("a model's version could not be loaded: %s", error)
