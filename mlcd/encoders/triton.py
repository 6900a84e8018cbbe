"""The engine Triton: a model that an NVIDIA Triton server runs, over gRPC.

Triton batches by itself: each image may be a request of its own. Every request carries its
deadline, which bounds the wait here and, as Triton's queue timeout, there. A request that is
cancelled here is cancelled there. Only gRPC itself repeats requests, and only those that have not
left this machine.
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
# Triton batches requests of one shape: texts are padded to a multiple of this length, so that those
# of several callers meet
_LENGTHS: Final = 8
# seconds; Triton answers in about a millisecond, from a thread that no inference blocks, so a
# longer wait means that it hangs
_READY_TIMEOUT_S: Final = 1.0
# seconds; an inference within them proves that the model runs, otherwise an empty image is sent to
# see
_RECENT_S: Final = 5.0
# seconds between reads of Triton's statistics (0.4 ms each) while an empty image is in flight
_LOOK_S: Final = 0.25
# times the slowest request or batch took (a large one of a large model on a CPU); one that takes
# longer hangs
_PATIENCE: Final = 2
_FORGETTING: Final = 0.99
_BUSY_PAUSE_S: Final = 0.1
_MICROSECONDS: Final = 1_000_000
_NANOSECONDS: Final = 1_000_000_000
CHANNEL: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A restarted server is found at once; gRPC's own pauses grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.use_local_subchannel_pool", 1),
    # By default gRPC would use the environment's proxy.
    ("grpc.enable_http_proxy", 0),
]
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class _Served:
    """The facts about one version from the model's configuration.

    parameters: what `mlcd export` wrote of this version, by name.
    """

    parameters: Mapping[str, str]
    dims: list[int]
    dimension: int
    max_batch: int

    @property
    def fingerprint(self) -> Fingerprint:
        return self.parameters["fingerprint"]


@dataclass(frozen=True)
class _Work:
    """The work of one version since it was loaded, by Triton's statistics.

    num_images: of inferences that succeeded. batches: by size, their number and the nanoseconds
    they took.
    """

    num_images: int = 0
    batches: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Any) -> "_Work":
        """Reads a ModelStatisticsResponse of one version."""
        (statistics,) = answer.model_stats
        batches = {
            row.batch_size: (row.compute_infer.count, row.compute_infer.ns)
            for row in statistics.batch_stats
        }
        return cls(statistics.inference_count, batches)

    def slowest_since(self, earlier: "_Work") -> float:
        """Returns the mean seconds of the batches of the size that took longest."""
        slowest = 0.0
        for size, (num, nanoseconds) in self.batches.items():
            num_before, before = earlier.batches.get(size, (0, 0))
            if num > num_before:
                slowest = max(slowest, (nanoseconds - before) / (num - num_before) / _NANOSECONDS)
        return slowest


async def open_triton(
    url: str,
    name: str,
    *,
    version: int | None = None,
    timeout_s: float = 10.0,
    probe_timeout_s: float = 2.0,
) -> "TritonEncoder":
    """Opens the model `name` of the Triton at `url` (HOST:PORT of its gRPC), and sees it embed;
    close it when done.

    version: None takes the latest that is loaded, and stays with it. timeout_s: for all of the
    opening. probe_timeout_s: how long one image may take, where no request took longer, before that
    counts as hanging. Raises Unavailable where Triton, the model or the version is not there,
    ArtifactInvalid for a model that `mlcd export --format triton` did not make.
    """

    def make(connection: "_OpenedVersion", served: _Served) -> TritonEncoder:
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

    folder: holds the version's tokenizer.json and config.json. Raises ArtifactInvalid where its
    tokenizer is another than the one that Triton states, and what `open_triton` raises.
    """
    settings, tokenizer = TextSettings.read(folder), Tokenizer.open(folder)
    digest = sha256((folder / TOKENIZER).read_bytes()).hexdigest()

    def make(connection: "_OpenedVersion", served: _Served) -> TritonTextEncoder:
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
    make: Callable[["_OpenedVersion", _Served], "_Opened"],
    timeout_s: float,
) -> "_Opened":
    _check_address(url)
    model_name(name)
    client = InferenceServerClient(url, channel_args=CHANNEL)
    try:
        async with asyncio.timeout(timeout_s):
            number = version if version is not None else await _latest(client, url, name, timeout_s)
            connection = _OpenedVersion(client, url, name, number, tower_input)
            encoder = make(connection, await connection.read_config(timeout_s))
            await _until_it_embeds(encoder, timeout_s)
    except TimeoutError as error:
        await client.close()
        raise Unavailable(
            f"Triton at {url} does not answer within {timeout_s:g} s", remedy="is it up?"
        ) from error
    except BaseException:
        await client.close()
        raise
    encoder.watch()
    return encoder


@dataclass(frozen=True)
class _TowerInput:
    """The input of a tower: its name, its type, and what each version states of it."""

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

    async def read_config(self, timeout_s: float) -> _Served:
        """Reads the model's configuration; raises ArtifactInvalid for one that is not ours."""
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
                f"Triton's model {self.name} does not state its {min(missing)}", remedy=_REMEDY
            )
        inputs = {tensor.name: list(tensor.dims) for tensor in config.input}
        outputs = {tensor.name: list(tensor.dims) for tensor in config.output}
        fits = list(inputs) == [self.tower_input.name] and list(outputs) == [_OUTPUT]
        if not fits or config.max_batch_size < 1 or len(outputs[_OUTPUT]) != 1:
            raise _not_ours(self.name)
        return _Served(
            {name: parameters[key] for name, key in keys.items()},
            inputs[self.tower_input.name],
            outputs[_OUTPUT][0],
            config.max_batch_size,
        )


class _TritonTower(ABC):
    """The common part of the encoders of images and of texts: requests, and the watch over the
    model's health.
    """

    engine = "triton"

    def __init__(
        self, connection: _OpenedVersion, served: _Served, *, probe_timeout_s: float
    ) -> None:
        self.version, self.url = connection.version, connection.url
        self.fingerprint, self.precision = served.fingerprint, served.parameters["precision"]
        self.dimension, self.max_batch = served.dimension, served.max_batch
        # the event loop's time at which an inference of this version was last seen to end, whoever
        # requested it
        self.last_success = -np.inf
        # seconds of the slowest recent request of ours, or batch of any client
        self.slowest_s = 0.0
        self._connection, self._probe_timeout_s = connection, probe_timeout_s
        self._work = _Work()
        self._circuit = Circuit(self._check)

    @abstractmethod
    def _smallest(self) -> NDArray[Any]:
        """Returns the batch of one item that shows whether the model runs."""

    @property
    def up(self) -> bool:
        """Tells whether the version is loaded and has embedded lately, as the watcher saw at most
        about 2 s ago.
        """
        return self._circuit.fault is None

    @property
    def fault(self) -> MlcdError | None:
        """Returns why it is not up."""
        return self._circuit.fault

    @property
    def patience_s(self) -> float:
        """Returns the seconds after which the model hangs, where a request of ours waits and no
        inference ends.
        """
        return max(self._probe_timeout_s, _PATIENCE * self.slowest_s)

    def watch(self) -> None:
        self._circuit.start()

    async def _encode_parts(
        self, parts: Sequence[NDArray[Any]], timeout_s: float, traceparent: str | None
    ) -> list[Embeddings]:
        """Encodes batches of at most `max_batch` items at one time; `timeout_s` is for all."""
        if len(parts) == 1:
            return [await self._encode_part(parts[0], timeout_s, traceparent)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._encode_part(part, timeout_s, traceparent))
                    for part in parts
                ]
        except ExceptionGroup as failures:
            # `except*` is not used: in Python 3.11.2, Debian 12's, it wraps a member that it raises
            # in a group again.
            ours, unexpected = failures.split(MlcdError)
            if ours is None or unexpected is not None:
                raise
            raise _first(ours) from None
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Ends the connection; a second call does nothing. At a shutdown it comes first, because
        Triton waits for its clients.
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
        """Embeds the smallest batch; raises what `encode` raises."""
        await self._infer(self._smallest(), timeout_s, None)

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
                f"Triton's model {connection.name} returned another shape or type than its"
                " configuration says",
                remedy="reload it",
            )
        self._note_success(clock() - started)
        return unit_or_zero(rows)

    def _note_success(self, seconds: float) -> None:
        self.last_success = asyncio.get_running_loop().time()
        self.slowest_s = max(seconds, _FORGETTING * self.slowest_s)

    async def _check(self, suspected: bool) -> None:  # noqa: FBT001 - the circuit's signature
        """Raises where the version cannot serve: not loaded, not the one that was opened, or no
        inference ends.
        """
        connection = self._connection
        request = connection.client.is_model_ready(
            connection.name, str(self.version), client_timeout=_READY_TIMEOUT_S
        )
        if not await connection.answer(request):
            raise _not_loaded(connection.name, self.version)
        if not self.up:
            await self._refuse_another()
        await self._look()
        # requests in flight show it themselves, in time
        idle = (
            asyncio.get_running_loop().time() - self.last_success > _RECENT_S
            and not self._circuit.num_in_flight
        )
        if suspected or idle or not self.up:
            await self._see_one_end()

    async def _see_one_end(self) -> None:
        """Raises where an empty image fails, or hangs while no other inference ends. A queued probe
        is not a failure.
        """
        started = self.last_success
        probe = asyncio.create_task(self.probe(self.patience_s))
        try:
            while not probe.done() and self.last_success == started:
                await asyncio.wait([probe], timeout=_LOOK_S)
                await self._look()
            if self.last_success == started:
                await probe
        except Overloaded:
            return  # a server that refuses is alive
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    async def _look(self) -> None:
        """Reads from Triton's own statistics which inferences have ended, and how long their
        batches took.

        Where they may not be read, only our own inferences show it.
        """
        connection = self._connection
        request = connection.client.get_inference_statistics(
            connection.name, str(self.version), client_timeout=_READY_TIMEOUT_S
        )
        try:
            work = _Work.of(await connection.answer(request))
        except DeadlineExceeded:
            raise  # the server hangs
        except MlcdError:
            return
        if work.num_images > self._work.num_images:
            self._note_success(work.slowest_since(self._work))
        self._work = work

    async def _refuse_another(self) -> None:
        """Raises where the server came back with another model, whose vectors must not answer for
        ours.
        """
        served = await self._connection.read_config(_READY_TIMEOUT_S)
        if served.fingerprint != self.fingerprint:
            raise Unavailable(
                f"Triton's model {self._connection.name} version {self.version} is another than the"
                " one that was opened",
                remedy="open it again",
            )


class TritonEncoder(_TritonTower):
    """The encoder that `open_triton` opens, an asynchronous form of the `Encoder` protocol for
    tasks of one event loop.
    """

    def __init__(
        self,
        connection: _OpenedVersion,
        served: _Served,
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

        timeout_s: until the caller's deadline; finite. traceparent: W3C's trace context, passed on.
        A row without a direction comes back as zeros. Raises InvalidInput where the batch has
        another shape, Overloaded where Triton's queue is full, DeadlineExceeded when the time has
        passed, and Unavailable where Triton or the model is not there: at once, when that is known.
        """
        check_batch(images, self.preprocess.crop)
        parts = [
            images[start : start + self.max_batch]
            for start in range(0, len(images), self.max_batch)
        ]
        rows = await self._encode_parts(parts, timeout_s, traceparent)
        return np.concatenate([np.empty((0, self.dimension), np.float32), *rows])

    def _smallest(self) -> NDArray[Any]:
        side = self.preprocess.crop
        return np.zeros((1, 3, side, side), np.uint8)


class TritonTextEncoder(_TritonTower):
    """The encoder that `open_triton_text` opens, an asynchronous form of the `TextEncoder`
    protocol for tasks of one event loop.
    """

    def __init__(
        self,
        connection: _OpenedVersion,
        served: _Served,
        name: str,
        settings: TextSettings,
        tokenizer: Tokenizer,
        *,
        probe_timeout_s: float,
    ) -> None:
        """name: that of the whole model."""
        super().__init__(connection, served, probe_timeout_s=probe_timeout_s)
        self.name, self.tokenizer = name, tokenizer
        self.calibration = Calibration.of(settings)
        self._batches = TokenBatches(settings, tokenizer)

    async def encode(
        self, ids: TokenBatch, *, timeout_s: float, traceparent: str | None = None
    ) -> Embeddings:
        """Encodes int64 [N, T] to float32 [N, dimension] of unit rows, rows of like length in one
        request.

        timeout_s, traceparent and errors are those of `TritonEncoder.encode`.
        """
        parts = self._batches.split(ids, max_batch=self.max_batch, multiple=_LENGTHS)
        rows = np.empty((len(ids), self.dimension), np.float32)
        encoded = await self._encode_parts([part for _, part in parts], timeout_s, traceparent)
        for (numbers, _), vectors in zip(parts, encoded, strict=True):
            rows[numbers] = vectors
        return rows

    def _smallest(self) -> NDArray[Any]:
        return self._batches.split(self.tokenizer(["a"]), max_batch=1, multiple=_LENGTHS)[0][1]


_Opened = TypeVar("_Opened", TritonEncoder, TritonTextEncoder)


async def _until_it_embeds(encoder: _TritonTower, timeout_s: float) -> None:
    """Probes until the model embeds, and repeats where the server is too busy."""
    while True:
        try:
            await encoder.probe(timeout_s)
        except Overloaded:
            await asyncio.sleep(_BUSY_PAUSE_S)
        else:
            return


async def _latest(client: InferenceServerClient, url: str, name: str, timeout_s: float) -> int:
    metadata = await translate_answer(
        client.get_model_metadata(name, client_timeout=timeout_s), url, name, None
    )
    return max(int(version) for version in metadata.versions)


def _read_preprocess(name: str, served: _Served) -> PreprocessSpec:
    try:
        preprocess = PreprocessSpec.from_dict(json.loads(served.parameters["preprocess"]))
    except ValueError as error:
        raise ArtifactInvalid(
            f"Triton's model {name} states no readable preprocessing", remedy=_REMEDY
        ) from error
    if served.dims != [3, preprocess.crop, preprocess.crop]:
        raise _not_ours(name)
    return preprocess


def _not_ours(name: str) -> ArtifactInvalid:
    return ArtifactInvalid(
        f"Triton's model {name} does not take and give what mlcd exports", remedy=_REMEDY
    )


async def translate_answer(
    request: Coroutine[Any, Any, _Answer], url: str, name: str, version: int | None
) -> _Answer:
    """Returns the answer, or raises our error for Triton's.

    It is chosen by status, and by Triton's own words where one status means three things. Triton's
    text goes no further.
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


def _first(errors: ExceptionGroup[MlcdError]) -> MlcdError:
    """Returns one error of the parts of a batch."""
    error = errors.exceptions[0]
    return error if isinstance(error, MlcdError) else _first(error)


def _check_address(url: str) -> None:
    host, _, port = url.rpartition(":")
    if not host or not port.isdecimal() or "/" in url:
        raise ConfigInvalid(f"the address of Triton's gRPC must be HOST:PORT, got {url!r}")
