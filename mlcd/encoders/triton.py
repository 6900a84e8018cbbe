"""The engine Triton: a model that an NVIDIA Triton server runs, over gRPC.

Triton batches requests itself, so each image may be a separate request. Every request has a
deadline, for the wait here and as Triton's queue timeout. Cancelling a request here cancels it in
Triton. Only gRPC itself retries requests, and only requests that have not left this machine.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from mlcd.encoders.circuit import Circuit
from mlcd.encoders.text_encoder import Calibration
from mlcd.encoders.token_batches import TokenBatches
from mlcd.encoders.unit_rows import check_batch, unit_or_zero
from mlcd.errors import (
    ArtifactInvalid,
    ConfigInvalid,
    DeadlineExceeded,
    MlcdError,
    Overloaded,
    Unavailable,
)
from mlcd.images.transform import PreprocessSpec
from mlcd.models.text_part import TEXT_SUFFIX, TOKENIZER, TextSettings
from mlcd.models.tokenizer import Tokenizer
from mlcd.types import Embeddings, Fingerprint, ImageBatch, TokenBatch, model_name

_OUTPUT: Final = "embedding"
_REMEDY: Final = "export it with `mlcd export --format triton`"
# Triton only batches requests of equal shape: texts are padded to a multiple of this length, so
# that requests of several callers share a batch.
_LENGTH_MULTIPLE: Final = 8
# Triton answers readiness in about a millisecond, from a thread that no inference blocks: after
# this time it hangs.
_READY_TIMEOUT_S: Final = 1.0
# An inference that ended within this time proves that the model runs; otherwise a probe is sent.
_RECENT_S: Final = 5.0
# between reads of Triton's statistics (0.4 ms each) while a probe is in flight
_STATISTICS_INTERVAL_S: Final = 0.25
# An inference hangs if it takes longer than this times the slowest recent request or batch.
_PATIENCE: Final = 2
# decay of the slowest time per successful inference
_SLOWEST_DECAY: Final = 0.99
_BUSY_PAUSE_S: Final = 0.1
_MICROSECONDS: Final = 1_000_000
_NANOSECONDS: Final = 1_000_000_000
CHANNEL: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Short, to reconnect soon to a restarted server; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC would use the environment's proxy by default.
    ("grpc.enable_http_proxy", 0),
]
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class _VersionConfig:
    """One version's part of the model's configuration.

    parameters: the version's parameters that `mlcd export` wrote, by name.
    """

    parameters: Mapping[str, str]
    dims: list[int]
    dimension: int
    max_batch: int

    @property
    def fingerprint(self) -> Fingerprint:
        return self.parameters["fingerprint"]


@dataclass(frozen=True)
class _Statistics:
    """Triton's statistics of one version since it was loaded.

    num_images: images in successful inferences. batches: by batch size, the number of batches and
    their total nanoseconds.
    """

    num_images: int = 0
    batches: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Any) -> "_Statistics":
        """Reads a ModelStatisticsResponse of one version."""
        (statistics,) = answer.model_stats
        batches = {
            row.batch_size: (row.compute_infer.count, row.compute_infer.ns)
            for row in statistics.batch_stats
        }
        return cls(statistics.inference_count, batches)

    def slowest_since(self, earlier: "_Statistics") -> float:
        """Returns the seconds per batch since `earlier`, for the batch size with the longest
        mean.
        """
        slowest_s = 0.0
        for size, (num, total_ns) in self.batches.items():
            earlier_num, earlier_ns = earlier.batches.get(size, (0, 0))
            if num > earlier_num:
                mean_ns = (total_ns - earlier_ns) / (num - earlier_num)
                slowest_s = max(slowest_s, mean_ns / _NANOSECONDS)
        return slowest_s


async def open_triton(
    url: str,
    name: str,
    *,
    version: int | None = None,
    timeout_s: float = 10.0,
    probe_timeout_s: float = 2.0,
) -> "TritonEncoder":
    """Opens the model `name` of the Triton at `url` (HOST:PORT of its gRPC) and waits until a probe
    succeeds; close it when done.

    version: None selects the latest loaded version, permanently. timeout_s: time limit of the whole
    opening. probe_timeout_s: minimum time after which an inference of one image counts as hanging.
    Raises Unavailable if Triton is unreachable or the model or version is not loaded, and
    ArtifactInvalid for a model that `mlcd export --format triton` did not make.
    """

    def make(connection: "_OpenedVersion", served: _VersionConfig) -> TritonEncoder:
        return TritonEncoder(
            connection, served, _read_preprocess(name, served), probe_timeout_s=probe_timeout_s
        )

    return await _open(url, name, version, _IMAGES, make, timeout_s)


async def open_triton_text(
    url: str,
    name: str,
    folder: Path,
    *,
    version: int | None = None,
    timeout_s: float = 10.0,
    probe_timeout_s: float = 2.0,
) -> "TritonTextEncoder":
    """Opens the text tower of the model `name`, which Triton serves as `name`-text.

    folder: folder with the version's tokenizer.json and config.json. Raises ArtifactInvalid if its
    tokenizer differs from that of Triton's model, and the errors of `open_triton`.
    """
    settings, tokenizer = TextSettings.read(folder), Tokenizer.open(folder)
    digest = sha256((folder / TOKENIZER).read_bytes()).hexdigest()

    def make(connection: "_OpenedVersion", served: _VersionConfig) -> TritonTextEncoder:
        if served.parameters["tokenizer"] != digest:
            raise ArtifactInvalid(
                f"{folder / TOKENIZER} is not the tokenizer of Triton's model {connection.name}",
                remedy="give the folder of the version that is loaded",
            )
        if served.dims != [-1] or served.dimension != settings.dimension:
            raise _not_ours(connection.name)
        return TritonTextEncoder(
            connection, served, name, settings, tokenizer, probe_timeout_s=probe_timeout_s
        )

    return await _open(url, name + TEXT_SUFFIX, version, _TEXTS, make, timeout_s)


async def _open(
    url: str,
    name: str,
    version: int | None,
    tower_input: "_TowerInput",
    make: Callable[["_OpenedVersion", _VersionConfig], "_Opened"],
    timeout_s: float,
) -> "_Opened":
    _check_address(url)
    model_name(name)
    client = InferenceServerClient(url, channel_args=CHANNEL)
    try:
        async with asyncio.timeout(timeout_s):
            if version is None:
                version = await _find_latest(client, url, name, timeout_s)
            connection = _OpenedVersion(client, url, name, version, tower_input)
            encoder = make(connection, await connection.read_config(timeout_s))
            await _wait_until_it_embeds(encoder, timeout_s)
    except TimeoutError as error:
        await client.close()
        raise Unavailable(
            f"Triton at {url} did not answer within {timeout_s:g} s", remedy="is it up?"
        ) from error
    except BaseException:
        await client.close()
        raise
    encoder.watch()
    return encoder


@dataclass(frozen=True)
class _TowerInput:
    """The input of a tower: its name, its Triton type, and the parameter that describes it."""

    name: str
    kind: str
    parameter: str


_IMAGES: Final = _TowerInput("image_u8", "UINT8", "preprocess")
_TEXTS: Final = _TowerInput("ids", "INT64", "tokenizer")


@dataclass(frozen=True)
class _OpenedVersion:
    """One version of a model in a Triton, and the connection to it."""

    client: InferenceServerClient
    url: str
    name: str
    version: int
    tower_input: _TowerInput

    async def answer(self, request: Coroutine[Any, Any, _Answer]) -> _Answer:
        return await translate_answer(request, self.url, self.name, self.version)

    async def read_config(self, timeout_s: float) -> _VersionConfig:
        """Reads the model's configuration; raises ArtifactInvalid if mlcd did not export the
        model.
        """
        request = self.client.get_model_config(
            self.name, str(self.version), client_timeout=timeout_s
        )
        config = (await self.answer(request)).config
        parameters = {key: parameter.string_value for key, parameter in config.parameters.items()}
        keys = {
            name: f"{name}.{self.version}" for name in ("fingerprint", self.tower_input.parameter)
        }
        keys["precision"] = "precision"
        if missing := set(keys.values()) - parameters.keys():
            raise ArtifactInvalid(
                f"the configuration of Triton's model {self.name} must have the parameter"
                f" {min(missing)}",
                remedy=_REMEDY,
            )
        inputs = {tensor.name: list(tensor.dims) for tensor in config.input}
        outputs = {tensor.name: list(tensor.dims) for tensor in config.output}
        fits = list(inputs) == [self.tower_input.name] and list(outputs) == [_OUTPUT]
        if not fits or config.max_batch_size < 1 or len(outputs[_OUTPUT]) != 1:
            raise _not_ours(self.name)
        return _VersionConfig(
            {name: parameters[key] for name, key in keys.items()},
            inputs[self.tower_input.name],
            outputs[_OUTPUT][0],
            config.max_batch_size,
        )


class _TritonTower(ABC):
    """The common part of the image and text encoders: requests and health checks."""

    engine = "triton"

    def __init__(
        self, connection: _OpenedVersion, served: _VersionConfig, *, probe_timeout_s: float
    ) -> None:
        self.version, self.url = connection.version, connection.url
        self.fingerprint, self.precision = served.fingerprint, served.parameters["precision"]
        self.dimension, self.max_batch = served.dimension, served.max_batch
        # the event loop's time when an inference of this version, by any client, was last known to
        # succeed
        self.last_success = -np.inf
        # seconds of the slowest recent request of this encoder, or batch of any client
        self.slowest_s = 0.0
        self._connection, self._probe_timeout_s = connection, probe_timeout_s
        self._statistics = _Statistics()
        self._circuit = Circuit(self._check)

    @abstractmethod
    def _make_probe(self) -> NDArray[Any]:
        """Returns the batch of one item that probes the model."""

    @property
    def up(self) -> bool:
        """Tells whether the version was loaded and embedding at the last check, at most about 2 s
        ago.
        """
        return self._circuit.fault is None

    @property
    def fault(self) -> MlcdError | None:
        """Returns why the version is not up; None if it is."""
        return self._circuit.fault

    @property
    def patience_s(self) -> float:
        """Returns the seconds after which the model counts as hanging, if a request waits and no
        inference ends.
        """
        return max(self._probe_timeout_s, _PATIENCE * self.slowest_s)

    def watch(self) -> None:
        self._circuit.start()

    async def _encode_parts(
        self, parts: Sequence[NDArray[Any]], timeout_s: float, traceparent: str | None
    ) -> list[Embeddings]:
        """Encodes batches of at most `max_batch` items concurrently, within `timeout_s`."""
        if len(parts) == 1:
            return [await self._encode_part(parts[0], timeout_s, traceparent)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._encode_part(part, timeout_s, traceparent))
                    for part in parts
                ]
        except ExceptionGroup as failures:
            # Not `except*`: in Python 3.11.2 (Debian 12) an error raised in it is wrapped in a
            # group again.
            mlcd_errors, unexpected = failures.split(MlcdError)
            if mlcd_errors is None or unexpected is not None:
                raise
            raise _first_error(mlcd_errors) from None
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Closes the connection; a second call does nothing. Close it before Triton shuts down,
        because Triton waits for its clients.
        """
        await self._circuit.close("the encoder is closed")
        await self._connection.client.close()

    async def _encode_part(
        self, batch: NDArray[Any], timeout_s: float, traceparent: str | None
    ) -> Embeddings:
        if timeout_s <= 0:
            raise DeadlineExceeded("the time for a request has passed")
        try:
            self._circuit.require()
            return await self._circuit.call(self._infer(batch, timeout_s, traceparent))
        except Overloaded:
            raise
        except Unavailable:
            self._circuit.suspect()
            raise

    async def probe(self, timeout_s: float) -> None:
        """Embeds one item; raises the errors of `encode`."""
        await self._infer(self._make_probe(), timeout_s, None)

    async def _infer(
        self, batch: NDArray[Any], timeout_s: float, traceparent: str | None
    ) -> Embeddings:
        connection = self._connection
        tensor = InferInput(
            connection.tower_input.name, list(batch.shape), connection.tower_input.kind
        )
        tensor.set_data_from_numpy(np.ascontiguousarray(batch))
        request = connection.client.infer(
            connection.name,
            [tensor],
            model_version=str(self.version),
            outputs=[InferRequestedOutput(_OUTPUT)],
            timeout=max(1, int(timeout_s * _MICROSECONDS)),
            client_timeout=timeout_s,
            headers=None if traceparent is None else {"traceparent": traceparent},
        )
        clock = asyncio.get_running_loop().time
        started = clock()
        rows = (await connection.answer(request)).as_numpy(_OUTPUT)
        if rows is None or rows.dtype != np.float32 or rows.shape != (len(batch), self.dimension):
            raise Unavailable(
                f"Triton's model {connection.name} returned a shape or type unlike its"
                " configuration",
                remedy="reload it",
            )
        self._note_success(clock() - started)
        return unit_or_zero(rows)

    def _note_success(self, seconds: float) -> None:
        self.last_success = asyncio.get_running_loop().time()
        self.slowest_s = max(seconds, _SLOWEST_DECAY * self.slowest_s)

    async def _check(self, suspected: bool) -> None:  # noqa: FBT001 - the circuit's signature
        """Raises if the version cannot serve: it is not loaded, its fingerprint changed, or no
        inference ends.
        """
        connection = self._connection
        request = connection.client.is_model_ready(
            connection.name, str(self.version), client_timeout=_READY_TIMEOUT_S
        )
        if not await connection.answer(request):
            raise _not_loaded(connection.name, self.version)
        if not self.up:
            await self._refuse_another_model()
        await self._read_statistics()
        # requests in flight serve as probes themselves
        idle = (
            asyncio.get_running_loop().time() - self.last_success > _RECENT_S
            and not self._circuit.num_in_flight
        )
        if suspected or idle or not self.up:
            await self._wait_for_success()

    async def _wait_for_success(self) -> None:
        """Sends a probe, and waits until it or any other inference succeeds. Raises if the probe
        fails, or hangs while no other inference ends. A queued probe is not a failure.
        """
        earlier_success = self.last_success
        probe = asyncio.create_task(self.probe(self.patience_s))
        try:
            while not probe.done() and self.last_success == earlier_success:
                await asyncio.wait([probe], timeout=_STATISTICS_INTERVAL_S)
                await self._read_statistics()
            if self.last_success == earlier_success:
                await probe
        except Overloaded:
            return  # a server that refuses is alive
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    async def _read_statistics(self) -> None:
        """Updates `last_success` and `slowest_s` from Triton's statistics.

        If Triton refuses to report them, only this encoder's own inferences count.
        """
        connection = self._connection
        request = connection.client.get_inference_statistics(
            connection.name, str(self.version), client_timeout=_READY_TIMEOUT_S
        )
        try:
            statistics = _Statistics.of(await connection.answer(request))
        except DeadlineExceeded:
            raise  # the server hangs
        except MlcdError:
            return
        if statistics.num_images > self._statistics.num_images:
            self._note_success(statistics.slowest_since(self._statistics))
        self._statistics = statistics

    async def _refuse_another_model(self) -> None:
        """Raises if the server returned with another model: its embeddings are not comparable."""
        served = await self._connection.read_config(_READY_TIMEOUT_S)
        if served.fingerprint != self.fingerprint:
            raise Unavailable(
                f"Triton's model {self._connection.name} version {self.version} has changed since"
                " it was opened",
                remedy="open it again",
            )


class TritonEncoder(_TritonTower):
    """The image encoder of `open_triton`: an asynchronous form of the `Encoder` protocol, for tasks
    of one event loop.
    """

    def __init__(
        self,
        connection: _OpenedVersion,
        served: _VersionConfig,
        preprocess: PreprocessSpec,
        *,
        probe_timeout_s: float,
    ) -> None:
        super().__init__(connection, served, probe_timeout_s=probe_timeout_s)
        self.name, self.preprocess = connection.name, preprocess

    async def encode(
        self, images: ImageBatch, *, timeout_s: float, traceparent: str | None = None
    ) -> Embeddings:
        """Encodes uint8 [N, 3, crop, crop] to float32 [N, dimension] of unit rows, in requests of
        at most `max_batch` images.

        timeout_s: seconds until the caller's deadline; finite. traceparent: W3C trace context for
        Triton. A row of norm 0 is returned as zeros. Raises InvalidInput for a batch of another
        shape, Overloaded if Triton's queue is full, DeadlineExceeded after `timeout_s`, and
        Unavailable if Triton or the model is down (immediately, if that is known).
        """
        check_batch(images, self.preprocess.crop)
        parts = [
            images[start : start + self.max_batch]
            for start in range(0, len(images), self.max_batch)
        ]
        rows = await self._encode_parts(parts, timeout_s, traceparent)
        return np.concatenate([np.empty((0, self.dimension), np.float32), *rows])

    def _make_probe(self) -> NDArray[Any]:
        side = self.preprocess.crop
        return np.zeros((1, 3, side, side), np.uint8)


class TritonTextEncoder(_TritonTower):
    """The text encoder of `open_triton_text`: an asynchronous form of the `TextEncoder` protocol,
    for tasks of one event loop.
    """

    def __init__(
        self,
        connection: _OpenedVersion,
        served: _VersionConfig,
        name: str,
        settings: TextSettings,
        tokenizer: Tokenizer,
        *,
        probe_timeout_s: float,
    ) -> None:
        """name: name of the whole model."""
        super().__init__(connection, served, probe_timeout_s=probe_timeout_s)
        self.name, self.tokenizer = name, tokenizer
        self.calibration = Calibration.of(settings)
        self._batches = TokenBatches(settings, tokenizer)

    async def encode(
        self, ids: TokenBatch, *, timeout_s: float, traceparent: str | None = None
    ) -> Embeddings:
        """Encodes int64 [N, T] to float32 [N, dimension] of unit rows, with rows of similar length
        in one request.

        For timeout_s, traceparent and errors see `TritonEncoder.encode`.
        """
        parts = self._batches.split(ids, max_batch=self.max_batch, multiple=_LENGTH_MULTIPLE)
        rows = np.empty((len(ids), self.dimension), np.float32)
        encoded = await self._encode_parts([part for _, part in parts], timeout_s, traceparent)
        for (row_indices, _), vectors in zip(parts, encoded, strict=True):
            rows[row_indices] = vectors
        return rows

    def _make_probe(self) -> NDArray[Any]:
        return self._batches.split(self.tokenizer(["a"]), max_batch=1, multiple=_LENGTH_MULTIPLE)[
            0
        ][1]


_Opened = TypeVar("_Opened", TritonEncoder, TritonTextEncoder)


async def _wait_until_it_embeds(encoder: _TritonTower, timeout_s: float) -> None:
    """Probes the model, and repeats the probe while the server is overloaded."""
    while True:
        try:
            await encoder.probe(timeout_s)
        except Overloaded:
            await asyncio.sleep(_BUSY_PAUSE_S)
        else:
            return


async def _find_latest(client: InferenceServerClient, url: str, name: str, timeout_s: float) -> int:
    metadata = await translate_answer(
        client.get_model_metadata(name, client_timeout=timeout_s), url, name, None
    )
    return max(int(version) for version in metadata.versions)


def _read_preprocess(name: str, served: _VersionConfig) -> PreprocessSpec:
    try:
        preprocess = PreprocessSpec.from_dict(json.loads(served.parameters["preprocess"]))
    except ValueError as error:
        raise ArtifactInvalid(
            f"the preprocessing of Triton's model {name} cannot be read", remedy=_REMEDY
        ) from error
    if served.dims != [3, preprocess.crop, preprocess.crop]:
        raise _not_ours(name)
    return preprocess


def _not_ours(name: str) -> ArtifactInvalid:
    return ArtifactInvalid(
        f"Triton's model {name} must have the inputs and outputs of an mlcd export", remedy=_REMEDY
    )


async def translate_answer(
    request: Coroutine[Any, Any, _Answer], url: str, name: str, version: int | None
) -> _Answer:
    """Returns the answer, or raises our error in place of Triton's.

    The status decides which error; for a status with three meanings, Triton's text decides. The
    error does not contain Triton's text.
    """
    try:
        return await request
    except InferenceServerException as error:
        raise _error(error, url, name, version) from error


def _error(error: InferenceServerException, url: str, name: str, version: int | None) -> MlcdError:
    status, text = error.status(), (error.message() or "").lower()
    if status == "StatusCode.DEADLINE_EXCEEDED":
        return DeadlineExceeded("Triton did not answer within the time for the request")
    if status == "StatusCode.NOT_FOUND" or "request for unknown model" in text:
        return _not_loaded(name, version)
    if status != "StatusCode.UNAVAILABLE":
        return Unavailable(f"the model {name} failed in Triton", remedy="Triton's log says why")
    if "exceeds maximum queue size" in text:
        return Overloaded("Triton's queue is full", remedy="try again in a moment")
    if "request timeout expired" in text:
        return DeadlineExceeded("the time for the request passed in Triton's queue")
    return Unavailable(f"Triton at {url} cannot be reached", remedy="is it up?")


def _not_loaded(name: str, version: int | None) -> Unavailable:
    which = f"the model {name}" if version is None else f"version {version} of the model {name}"
    return Unavailable(f"{which} is not loaded in Triton", remedy="load it there")


def _first_error(errors: ExceptionGroup[MlcdError]) -> MlcdError:
    error = errors.exceptions[0]
    return error if isinstance(error, MlcdError) else _first_error(error)


def _check_address(url: str) -> None:
    host, _, port = url.rpartition(":")
    if not host or not port.isdecimal() or "/" in url:
        raise ConfigInvalid(f"the address of Triton's gRPC must be HOST:PORT, got {url!r}")
