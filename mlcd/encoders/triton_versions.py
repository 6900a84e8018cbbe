"""Loads and unloads versions of a model in Triton, by its explicit model control.

A plain load reads the repository again and does nothing if it is unchanged. Then, and to load a
version that was unloaded, the load must pass a version policy that lists the versions to serve. In
both cases Triton serves its present versions until the new one is loaded and warmed up.
"""

import json
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from mlcd.encoders.triton import CHANNEL
from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    DeadlineExceeded,
    MlcdError,
    NotFound,
    Unavailable,
)

# the prefix of a version's parameter in config.pbtxt
_VERSION_PREFIX: Final = "fingerprint."
_Answer = TypeVar("_Answer")


async def load_version(url: str, name: str, version: int | None, *, timeout_s: float) -> int:
    """Makes the Triton at `url` load and warm up a version beside the loaded versions, and returns
    its number.

    version: None selects the newest in the repository. timeout_s: time limit of each call. Raises
    NotFound for an unknown version, ArtifactInvalid if Triton cannot load the model, ConfigInvalid
    if it does not allow clients to load models, and Unavailable.
    """
    async with _connect(url, name, timeout_s) as control:
        if version is not None and version in await control.list_loaded():
            return version
        await control.load()
        config = await control.config()
        listed = _list_versions(config)
        for candidate in listed if version is None else {version} & set(listed):
            if candidate not in (loaded := await control.list_loaded()):
                await control.load(config, loaded | {candidate})
            if candidate in await control.list_loaded():
                return candidate
    which = "no version that mlcd exported" if version is None else f"no version {version}"
    shown = ", ".join(map(str, sorted(listed))) or "none"
    raise NotFound(
        f"Triton's repository holds {which} of the model {name}", remedy=f"it lists: {shown}"
    )


async def keep_version(url: str, name: str, version: int, *, timeout_s: float) -> None:
    """Makes the Triton at `url` unload all other versions, while this version keeps serving.

    Raises the errors of `load_version`.
    """
    async with _connect(url, name, timeout_s) as control:
        if await control.list_loaded() != {version}:
            await control.load(await control.config(), {version})


@asynccontextmanager
async def _connect(url: str, name: str, timeout_s: float) -> AsyncIterator["_Control"]:
    client = InferenceServerClient(url, channel_args=CHANNEL)
    try:
        yield _Control(client, name, timeout_s)
    finally:
        await client.close()


class _Control:
    """Calls Triton's model control for one model."""

    def __init__(self, client: InferenceServerClient, name: str, timeout_s: float) -> None:
        self._client, self._name, self._timeout_s = client, name, timeout_s

    async def config(self) -> dict[str, Any]:
        """Returns the loaded configuration, in the names of Triton's protobuf."""
        request = self._client.get_model_config(
            self._name, as_json=True, client_timeout=self._timeout_s
        )
        config: dict[str, Any] = (await self._answer(request))["config"]
        return config

    async def list_loaded(self) -> set[int]:
        """Returns the loaded versions; an empty set if the model is not loaded."""
        try:
            metadata = await self._answer(
                self._client.get_model_metadata(self._name, client_timeout=self._timeout_s)
            )
        except NotFound:
            return set()
        return {int(version) for version in metadata.versions}

    async def load(
        self, config: dict[str, Any] | None = None, versions: Collection[int] = ()
    ) -> None:
        """Loads the model with the repository's configuration, or with `config` and only
        `versions` of it.
        """
        policy = {"version_policy": {"specific": {"versions": sorted(versions)}}}
        override = None if config is None else json.dumps({**config, **policy})
        await self._answer(
            self._client.load_model(self._name, config=override, client_timeout=self._timeout_s)
        )

    async def _answer(self, request: Coroutine[Any, Any, _Answer]) -> _Answer:
        try:
            return await request
        except InferenceServerException as error:
            raise _error(error, self._name) from error


def _list_versions(config: dict[str, Any]) -> list[int]:
    """Returns the versions in config.pbtxt, newest first."""
    suffixes = [
        key.removeprefix(_VERSION_PREFIX)
        for key in config.get("parameters", {})
        if key.startswith(_VERSION_PREFIX)
    ]
    return sorted((int(suffix) for suffix in suffixes if suffix.isdecimal()), reverse=True)


def _error(error: InferenceServerException, name: str) -> MlcdError:
    """Returns our error for Triton's status; drops Triton's text, which may contain a traceback."""
    status, text = error.status(), (error.message() or "").lower()
    if status == "StatusCode.DEADLINE_EXCEEDED":
        return DeadlineExceeded(f"Triton did not load the model {name} in time")
    if "not allowed" in text or "restricted" in text:
        return ConfigInvalid(
            "Triton does not allow clients to load models",
            remedy="start it with --model-control-mode=explicit",
        )
    if status == "StatusCode.NOT_FOUND" or "request for unknown model" in text:
        return NotFound(f"the model {name} is not loaded in Triton")
    if status == "StatusCode.UNAVAILABLE":
        return Unavailable("Triton cannot be reached", remedy="is it up?")
    return ArtifactInvalid(
        f"Triton cannot load the model {name}",
        remedy="its log says why; repair the version that fails, or remove it",
    )
