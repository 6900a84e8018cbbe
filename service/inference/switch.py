"""Switches from one version of the model to another while requests are being answered."""

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
from mlcd.service.host.allocator import free_what_was_closed
from mlcd.service.inference.engine.triton import TritonEngine, open_triton_engine
from mlcd.service.inference.model import ServedModel, SharedResources, open_model
from mlcd.service.inference.model_data import open_model_data
from mlcd.service.inference.served import ServedTower
from mlcd.service.timings import RETIREMENT_S

_log = logging.getLogger("mlcd.service")


class ModelSwitch:
    """Switches the served model to another version, one switch at a time.

    Use it as an async context manager, which cancels a running switch and closes what it opened. A
    request uses one model from its first byte to its answer. The former model is closed when its
    requests have ended; only then does Triton unload it.
    """

    def __init__(
        self, shared: SharedResources, folder: str, model: ServedModel, opened: AsyncExitStack
    ) -> None:
        """folder: folder of the model, which may contain centers. model: open model. opened: closes
        `model`; may be closed twice.
        """
        self._shared, self._folder = shared, folder
        self._model, self._opened = model, opened
        self._loading: asyncio.Task[int] | None = None
        self._retiring: asyncio.Task[None] | None = None

    @property
    def has_damaged_names(self) -> bool:
        """Tells whether the names of the served model's centers are damaged."""
        lookup = self._model.data.lookup
        return lookup is not None and lookup.damaged_names is not None

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
        """Loads a version, serves it by calling `publish`, and returns its number.

        On any error the present version stays. version: None selects the newest in Triton's
        repository. unload: whether Triton unloads every other version afterwards. deadline: end of
        the caller's wait, by the loop's clock; the switch itself continues after it.
        Raises Conflict if this server cannot switch, if a switch is in progress or if the version
        does not fit, NotFound for a missing version, Unavailable and DeadlineExceeded.
        """
        if not isinstance(self._model.engine, TritonEngine):
            raise Conflict(
                f"switching versions needs the engine triton, got {self._model.encoder.engine}",
                remedy="start the server with the other model, or with MLCD_ENGINE=triton",
            )
        if self._model.texts is not None:
            raise Conflict(
                "a server with a text tower cannot switch versions",
                remedy="restart it with MLCD_TRITON__VERSION and MLCD_TRITON__TEXT",
            )
        if self._shared.settings.processes > 1:
            raise Conflict(
                "a server with several processes cannot switch versions",
                remedy="restart the server with the other version",
            )
        if self._loading is not None and not self._loading.done():
            raise Conflict(
                "another version is being loaded",
                remedy="wait until /v1/info shows it",
            )
        work = self._load(self._model.engine, version, unload=unload, publish=publish)
        # In a new context, because the task may outlive this request.
        self._loading = asyncio.create_task(work, name="model-switch", context=Context())
        self._loading.add_done_callback(_log_failure)
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(self._loading)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the version is not loaded yet",
                remedy="loading continues: /v1/info shows the version when it is served",
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
                new_engine = await stack.enter_async_context(
                    open_triton_engine(self._shared.settings, version=number)
                )
                _check_shape(engine.served, new_engine.served)
                shared = self._shared
                open_data = partial(
                    open_model_data, shared.settings, self._folder, shared.collections, strict=False
                )
                data = await asyncio.to_thread(open_data, new_engine.served.fingerprint)
                model = await stack.enter_async_context(
                    open_model(new_engine, None, self._shared, data)
                )
                if self._model.readiness.draining:
                    raise Unavailable("the server is stopping")
                self._replace(model, stack.pop_all(), publish, unload=unload)
        # These are errors of the requested version, not of this server.
        except (ArtifactInvalid, ConfigInvalid) as error:
            raise Conflict(error.message, remedy=error.remedy) from error
        return number

    def _replace(
        self,
        model: ServedModel,
        opened: AsyncExitStack,
        publish: Callable[[ServedModel], None],
        *,
        unload: bool,
    ) -> None:
        former, to_close = self._model, self._opened
        self._model, self._opened = model, opened
        self._shared.metrics.serve(**model.encoder.labels)
        model.engine.observe(self._shared.metrics)
        publish(model)
        _log.info("another version is served: %s", model.encoder.fingerprint)
        retiring = self._retire(former, to_close, model, unload=unload)
        self._retiring = asyncio.create_task(retiring, name="model-retirement", context=Context())
        # The former model's centers may take gigabytes.
        self._retiring.add_done_callback(lambda _: free_what_was_closed())

    async def _retire(
        self, former: ServedModel, opened: AsyncExitStack, model: ServedModel, *, unload: bool
    ) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._shared.settings.limits.deadline_s + RETIREMENT_S):
                    await former.requests.wait_for_none()
        finally:
            await opened.aclose()
        if unload:
            assert isinstance(model.engine, TritonEngine)
            try:
                await model.engine.unload_others()
            except MlcdError as error:
                _log.warning("Triton did not unload the former version: %s", error)


def _check_shape(former: ServedTower, new: ServedTower) -> None:
    shapes = [(served.dimension, served.item.shape[-1]) for served in (former, new)]
    if shapes[0] != shapes[1]:
        (dimension, side), (new_dimension, new_side) = shapes
        raise Conflict(
            f"the new version must have {dimension} dimensions and images of {side} x {side} pixels"
            f" as the served one, got {new_dimension} and {new_side} x {new_side}",
            remedy="start another server with it",
        )


def _log_failure(loading: "asyncio.Task[int]") -> None:
    """Logs a failed load, even if no request waits for it any more."""
    if loading.cancelled():
        return
    error = loading.exception()
    if error is not None and not isinstance(error, MlcdError):
        _log.error("a model's version could not be loaded: %s", type(error).__name__)
    elif error is not None:
        _log.warning("a model's version could not be loaded: %s", error)
