"""Settings of the service: the one place that reads the environment."""

import difflib
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mlcd.encoders.base import EngineName
from mlcd.errors import ConfigInvalid
from mlcd.images.decode import ExifPolicy
from mlcd.images.transform import DecodeMode
from service.hosts import ANY_HOST, canonical_entry

_COLLECTIONS, _LEDGER = "collections", "items.sqlite"
_PREFIX = "MLCD_"
_OF_CLIENTS = frozenset({"MLCD_API_KEY"})
"""Of `mlcd jobs`; in a shell that starts a server, too, it is no mistake."""
_MAX_PORT = 65535


class Limits(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What one request, and the server as a whole, may hold. Shown in /v1/info."""

    max_body_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20
    """Bytes of one request's body, counted while it streams in."""
    max_images: Annotated[int, Field(gt=0)] = 64
    """Images (or embeddings) in one request."""
    max_pixels: Annotated[int, Field(gt=0, le=178_956_970)] = 89_478_485
    """Pixels of one image, compared with its header before it is decoded (Pillow itself refuses twice the default)."""
    rate_pixels: Annotated[int, Field(gt=0)] = 4_000_000
    """Pixels that count as one image of a key's rate: a larger image that is to be decoded counts several times."""
    max_top: Annotated[int, Field(gt=0)] = 1000
    """Labels or matches per image."""
    max_queued_images: Annotated[int, Field(gt=0)] = 512
    """Images admitted at one time; beyond it requests are refused with 429."""
    max_queued_pixels: Annotated[int, Field(gt=0)] = 2_000_000_000
    """Pixels of the images admitted at one time, by their headers: what decoding them costs (10 ms a million).
    One request may have half as many."""
    max_queued_bytes: Annotated[int, Field(gt=0)] = 256 * 2**20
    """Bytes of request bodies held at one time; beyond it requests are refused before their bodies are read."""
    max_json_bytes: Annotated[int, Field(gt=0)] = 32 * 2**20
    """Bytes of JSON in one request's body."""
    max_json_text_bytes: Annotated[int, Field(gt=0)] = 4 * 2**20
    """Bytes of that JSON beside numbers and images in base64."""
    max_json_values: Annotated[int, Field(gt=0)] = 1_000_000
    """Values in that JSON, where a list, an object or a field counts as ten."""
    max_answer_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20
    """Bytes of one search's answer; for more, ask for fewer matches or leave their metadata out."""
    max_collections: Annotated[int, Field(gt=0)] = 1000
    """Collections that may be made over REST; those that are there already, or that jobs and commands add, are opened
    however many they are."""
    max_connections: Annotated[int, Field(gt=0)] = 1000
    """Connections at one time, at most half of the open files that the process may have; for one more, one that has its
    answer already is closed, else the one that has waited longest for its next request. Sixteen more may ask for
    health and metrics alone."""
    max_streams: Annotated[int, Field(gt=0)] = 128
    """Streams of a job's events at one time."""
    deadline_s: Annotated[float, Field(gt=0)] = 30.0
    """A request that is not answered by then gets 504, counted from its first byte."""

    @property
    def pixels_of_one(self) -> int:
        """Pixels of the images in one request: no client takes more than half of what all may."""
        return max(self.max_queued_pixels // 2, self.max_pixels)

    @model_validator(mode="after")
    def _one_request_fits(self) -> Self:
        for whole, part in (
            ("max_queued_bytes", "max_body_bytes"),
            ("max_queued_pixels", "max_pixels"),
        ):
            if getattr(self, whole) < getattr(self, part):
                raise ValueError(f"{whole} must not be less than {part}")
        if self.max_queued_images < self.max_images:
            raise ValueError("max_queued_images must not be less than max_images")
        return self


class Auth(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Who may enter."""

    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """The file of `mlcd keys`; with it every route but health, metrics and documents asks for a key."""
    mode: Literal["keys", "open"] = "keys"
    """keys: without a keys file only this machine is served; open: whoever reaches the server may use it."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.mode == "open" and self.keys_file is not None:
            raise ValueError("mode open and a keys file contradict each other")
        return self


class Log(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What is told on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """info: a line for every request, but probes of health and metrics, which come at debug."""
    format: Literal["auto", "json", "text"] = "auto"
    """auto: text on a terminal, JSON elsewhere."""


class Tracing(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """OpenTelemetry, with the extra `tracing` installed."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$")] | None = None
    """Of a collector, OTLP over HTTP: http://collector:4318, to which /v1/traces is added. Default: no tracing."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the requests that are traced, where the caller has not decided it."""


def _parts(value: object) -> list[str]:
    """Of a list as environment variables hold it, with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return (
        [str(part).strip() for part in parts if str(part).strip()]
        if isinstance(parts, list | tuple)
        else []
    )


def _hosts(value: object) -> list[str]:
    entries = [entry for part in _parts(value) if (entry := canonical_entry(part))]
    if len(entries) < len(_parts(value)):
        raise ValueError("hosts are names or addresses without scheme and port, *.suffix, or *")
    return entries


def _networks(value: object) -> list[IPv4Network | IPv6Network]:
    try:
        return [ip_network(part) for part in _parts(value)]
    except ValueError:
        raise ValueError(
            "networks are written 10.1.0.0/16, with nothing after the bits that count"
        ) from None


def _ports(value: object) -> list[int]:
    ports = [int(part) if part.isascii() and part.isdigit() else 0 for part in _parts(value)]
    if not all(0 < port <= _MAX_PORT for port in ports):
        raise ValueError(f"ports are numbers from 1 to {_MAX_PORT}")
    return ports


class Fetch(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Images by URL."""

    allow: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_hosts)] = ()
    """Hosts to fetch from, with commas: example.com, *.example.com (all below it), * (any, at public addresses).
    Default: none, URLs are refused."""
    networks: Annotated[
        tuple[IPv4Network | IPv6Network, ...], NoDecode, BeforeValidator(_networks)
    ] = ()
    """Networks, with commas, where those hosts may have their addresses though they are not public: 10.1.0.0/16."""
    ports: Annotated[tuple[int, ...], NoDecode, BeforeValidator(_ports)] = (80, 443)
    """Ports to fetch from, with commas."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """For all images of a request together; those that are not here by then fail, the others are answered."""
    max_redirects: Annotated[int, Field(ge=0, le=10)] = 3
    """From one URL to the next; each is checked as the first."""
    max_connections: Annotated[int, Field(gt=0, le=256)] = 32
    """Fetches at one time; the others wait."""
    max_connections_per_host: Annotated[int, Field(gt=0)] = 8
    """Fetches from one host at one time."""

    @model_validator(mode="after")
    def _inside_only_by_name(self) -> Self:
        if ANY_HOST in self.allow and self.networks:
            raise ValueError(
                "allow=* reaches public addresses only: name the hosts that are in networks"
            )
        return self


class Cache(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Vectors of images that were embedded before, in this process and, with a redis_url, in Redis."""

    memory_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Of a server process, for vectors and their bookkeeping; 0: none in the process."""
    ttl_s: Annotated[int, Field(ge=0, le=10 * 365 * 86400)] = 7 * 86400
    """Seconds that Redis keeps a vector; 0: none in Redis, whatever else it is used for."""
    redis_bytes: Annotated[int, Field(gt=0)] | None = None
    """While Redis as a whole uses more, no vector is written; unset: its own maxmemory alone."""
    timeout_s: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Of a look-up in Redis: one that takes longer is a miss."""
    dtype: Literal["float32", "float16"] = "float32"
    """float16 halves the bytes and rounds every vector, of misses too; answers then say X-Mlcd-Rounded: float16."""


def _folders(value: object) -> list[str]:
    folders = _parts(value)
    if not all(folder.startswith("/") for folder in folders):
        raise ValueError("roots are absolute paths, with commas")
    return folders


class Jobs(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Batch jobs over images that lie where servers and workers can read them."""

    roots: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_folders)] = ()
    """Folders, with commas, that inputs and outputs must be in; the same paths on every server and worker.
    Default: none, jobs are off."""
    shard_images: Annotated[int, Field(gt=0)] = 2048
    """Images of one piece of work, and what a worker that is killed has to do again; the same for all workers."""
    lease_s: Annotated[float, Field(ge=2)] = 30.0
    """A piece whose worker has not been heard of for so long is given to another one."""
    stall_s: Annotated[float, Field(gt=0)] = 300.0
    """A worker that gets no further with the images of a shard for so long hangs: it ends, with status 1, and the
    attempt has failed. Longer than a batch takes."""
    keep_days: Annotated[float, Field(gt=0, le=36500)] = 30.0
    """Of jobs that have ended; then the queue forgets them. Their outputs stay."""
    keep_jobs: Annotated[int, Field(gt=0)] = 5000
    """That have ended: of more than that the queue forgets those that ended first."""
    redis_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9:._{}-]{1,64}$")] = "mlcd:jobs:"
    """Of the queue's keys, where it is in Redis: deployments that share a database each have their own."""


class Triton(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """NVIDIA Triton, which runs the model where the engine is triton."""

    url: str | None = None
    """HOST:PORT of its gRPC."""
    version: Annotated[int, Field(ge=1)] | None = None
    """Of the model; unset: the latest that is loaded at start."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Of one inference, the wait in Triton's queue included; a request's own deadline may be sooner."""


class Settings(BaseSettings):
    """Environment variables MLCD_<NAME>, nested by two underscores: MLCD_LIMITS__MAX_IMAGES."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    model: str
    """A directory made by `mlcd export`, other weights as it takes them, an .onnx file with its JSON, hog or pixels."""
    centers: str | None = None
    """Centers to label with; default: those shipped in the model's directory."""
    engine: EngineName | Literal["triton", "fake"] = "auto"
    """triton: the model of that name in the Triton at MLCD_TRITON__URL. fake: of fixed latency, for load tests; only
    with a model fake:…, and never the other way round."""
    precision: Literal["fp32", "bf16"] = "fp32"
    exif: ExifPolicy | None = None
    """What orientation tags do, other than the model's preprocessing says; another fingerprint."""
    decode: DecodeMode | None = None
    """exact or fast (JPEG at a fraction of its size), other than the model's preprocessing says; as exif."""
    state_dir: str | None = None
    """Holds collections/NAME, made by `mlcd index` or over REST; where it can only be read, for searches alone."""
    approximate: bool = False
    """Make the approximate labels of /v1/labels?mode=approximate ready at start, audited on shipped or indexed rows."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; one that others reach only with keys, or with MLCD_AUTH__MODE=open."""
    hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_hosts)] = ()
    """Names, with commas, that clients may call the server by: example.com, *.example.com, * (any). Without keys it
    answers to localhost and loopback addresses besides, with MLCD_AUTH__MODE=open to all addresses and to names
    without a dot; with keys, and where none are given here, to any name."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free one."""
    processes: Annotated[int, Field(ge=1, le=256)] = 1
    """Server processes on one port, each with an engine, limits and a share of the cores of its own."""
    max_batch: Annotated[int, Field(ge=1)] = 32
    """Images that the engine is given at once."""
    engine_threads: Annotated[int, Field(ge=0)] = 0
    """Threads of an engine on the CPU; 0 takes one per core that the process may use."""
    decode_threads: Annotated[int, Field(ge=0)] = 0
    """Threads that decode images; 0 takes one per core."""
    batch_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """A batch that takes longer, and ten times as long as the largest at start, hangs: the engine is started again."""
    drain_s: Annotated[float, Field(ge=0)] = 1.0
    """After SIGTERM the server is not ready but goes on serving for so long, until the balancer has noticed."""
    grace_s: Annotated[float, Field(ge=0)] = 8.0
    """Then requests in flight have so long to finish."""
    redis_url: SecretStr | None = None
    """redis://[user:password@]host:port/database, rediss:// or unix://: what several servers share."""
    limits: Limits = Limits()
    fetch: Fetch = Fetch()
    auth: Auth = Auth()
    log: Log = Log()
    tracing: Tracing = Tracing()
    cache: Cache = Cache()
    triton: Triton = Triton()
    jobs: Jobs = Jobs()

    @model_validator(mode="after")
    def _fake_is_meant(self) -> Self:
        if (self.engine == "fake") != self.model.startswith("fake:"):
            raise ValueError(
                "engine fake and a model fake:… are for load tests, and go together only"
            )
        return self

    @model_validator(mode="after")
    def _triton_is_somewhere(self) -> Self:
        if (self.engine == "triton") != (self.triton.url is not None):
            raise ValueError("engine triton and MLCD_TRITON__URL go together only")
        return self


def read_settings(overrides: Mapping[str, Any], *, file: str | None = None) -> Settings:
    """Settings from `file` (lines NAME=value), on top the environment, then command-line `overrides` (None: not given).

    Raises ConfigInvalid for an unknown MLCD_ name, suggesting the nearest known one, and for bad values.
    """
    lines = {} if file is None else _read_lines(file)
    _check_names([*lines, *(name for name in os.environ if name.startswith(_PREFIX))])  # noqa: TID251 - the one place
    try:
        settings = Settings(
            **_nested(lines)
            | {name: value for name, value in overrides.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = _PREFIX + ("__".join(str(part).upper() for part in first["loc"]) or "ENGINE")
        if first["type"] == "missing":
            raise ConfigInvalid(f"{name} is not set", remedy="give --model or set it") from error
        raise ConfigInvalid(
            f"{name}: {first['msg'].removeprefix('Value error, ').lower()}"
        ) from error
    _check_state(settings.state_dir)
    return settings


def _check_state(state_dir: str | None) -> None:
    """Raises ConfigInvalid for the folder of the collections, or one of them, in place of the one that holds it."""
    if state_dir is None:
        return
    state = Path(state_dir).absolute()
    if (state / _LEDGER).is_file() and state.parent.name == _COLLECTIONS:
        state = state.parent
    elif state.name != _COLLECTIONS or next(state.glob(f"*/{_LEDGER}"), None) is None:
        return
    raise ConfigInvalid(
        f"{state_dir} is in what is the state: its collections would not be found",
        remedy=f"did you mean {state.parent}?",
    )


def read_keys_file(override: str | None) -> str:
    """Where the keys are, without the other settings. Raises ConfigInvalid where nobody said."""
    name = f"{_PREFIX}AUTH__KEYS_FILE"
    found = override or os.environ.get(name)  # noqa: TID251 - this is the one place
    if not found:
        raise ConfigInvalid("which keys file?", remedy=f"give --file or set {name}")
    return found


def setting_names() -> list[str]:
    return [name for name, _, _ in named_fields()]


def named_fields() -> Iterator[tuple[str, tuple[str, ...], FieldInfo]]:
    """The name, the path in Settings and the declaration of every setting, in order."""
    for name, field in Settings.model_fields.items():
        if (nested := nested_model(field)) is None:
            yield f"{_PREFIX}{name}".upper(), (name,), field
        else:
            for inner, declared in nested.model_fields.items():
                yield f"{_PREFIX}{name}__{inner}".upper(), (name, inner), declared


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """Of the settings that belong together."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def setting_lines(settings: Settings) -> list[str]:
    """Every setting as a line NAME=value for a shell or for `read_settings`; unset ones and secrets as comments."""
    lines = []
    for name, path, _ in named_fields():
        value: object = settings
        for part in path:
            value = getattr(value, part)
        if value is None or value == ():
            lines.append(f"# {name} is not set")
        elif isinstance(value, SecretStr):
            lines.append(f"# {name}={value}")
        else:
            lines.append(f"{name}={shlex.quote(as_text(value))}")
    return lines


def as_text(value: object) -> str:
    """As a setting's value is written in the environment."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _check_names(names: Iterable[str]) -> None:
    known = setting_names()
    for name in names:
        if name not in known and name not in _OF_CLIENTS:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise ConfigInvalid(f"unknown setting {name}", remedy=remedy)


def _read_lines(file: str) -> dict[str, str]:
    """Names and values of lines NAME=value, quoted as in a shell. Raises ConfigInvalid for a file that is none."""
    try:
        words = shlex.split(Path(file).read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError) as error:
        raise ConfigInvalid(
            f"the settings file {file} cannot be read", remedy="give lines NAME=value"
        ) from error
    pairs = [word.partition("=") for word in words]
    if not all(separator and name.isidentifier() for name, separator, _ in pairs):
        raise ConfigInvalid(
            f"the settings file {file} cannot be read", remedy="give lines NAME=value"
        )
    return {name: value for name, _, value in pairs}


def _nested(lines: Mapping[str, str]) -> dict[str, Any]:
    """As the class takes them, without those that the environment sets."""
    found: dict[str, Any] = {}
    for name, path, _ in named_fields():
        if name in lines and name not in os.environ:  # noqa: TID251 - this is the one place
            *groups, last = path
            place = found
            for group in groups:
                place = place.setdefault(group, {})
            place[last] = lines[name]
    return found
