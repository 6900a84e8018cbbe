"""The settings of the service; only this module reads the environment."""

import difflib
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mlcd.collections.store_urls import SHAPES, is_store
from mlcd.collections.thumbnail_store import DEFAULT_MAX_BYTES
from mlcd.encoders.encoder import EngineName, Precision
from mlcd.encoders.options import EncoderOptions
from mlcd.errors import ConfigInvalid
from mlcd.fetching.hosts import ANY_HOST
from mlcd.fetching.listed import parse_hosts, parse_networks, parse_ports, split_list
from mlcd.fetching.url_options import JobUrlOptions, UrlOptions
from mlcd.images.decode import ExifPolicy
from mlcd.images.thumbnail import DEFAULT_SIDE
from mlcd.images.transform import DecodeMode
from mlcd.locations import is_url
from mlcd.service.log import Log
from mlcd.service.timings import ENDPOINT_WAIT_S
from mlcd.types import model_name

_COLLECTIONS, _LEDGER = "collections", "items.sqlite"
_PREFIX = "MLCD_"
# variables of clients such as `mlcd jobs`, which may also be set in a shell that starts a server
_CLIENT_NAMES = frozenset({"MLCD_API_KEY", "MLCD_WEBHOOK_SECRET"})
# variables of secrets that only the engine's process reads
_ENGINE_NAMES = frozenset({"MLCD_ENDPOINT_KEY", "MLCD_ENDPOINT_KEY_FILE"})


class Limits(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Limits of one request and of the whole server, as shown in /v1/info."""

    max_body_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20
    """Bytes of one request's body."""
    max_images: Annotated[int, Field(gt=0)] = 64
    """Images (or embeddings) in one request."""
    max_pixels: Annotated[int, Field(gt=0, le=178_956_970)] = 89_478_485
    """Pixels of one image, by its header."""
    rate_pixels: Annotated[int, Field(gt=0)] = 4_000_000
    """Pixels charged as one image against a key's rate limit; a larger image is charged several
    times."""
    max_texts: Annotated[int, Field(gt=0)] = 2048
    """Texts in one request, or class names in one request to classify."""
    max_text_chars: Annotated[int, Field(gt=0, le=2**20)] = 8192
    """Characters of one text."""
    max_request_chars: Annotated[int, Field(gt=0)] = 2**20
    """Characters of all texts in one request, or of all prompts in one request to classify."""
    rate_chars: Annotated[int, Field(gt=0)] = 1024
    """Characters charged as one text against a key's rate limit; a longer text is charged several
    times."""
    max_prompts: Annotated[int, Field(gt=0)] = 16_384
    """Class names times templates in one request to classify."""
    max_top: Annotated[int, Field(gt=0)] = 1000
    """Labels or matches per image."""
    max_queued_images: Annotated[int, Field(gt=0)] = 512
    """Images admitted at the same time. Further requests are refused with 429."""
    max_queued_texts: Annotated[int, Field(gt=0)] = 8192
    """Texts admitted at the same time. Further requests are refused with 429."""
    max_queued_pixels: Annotated[int, Field(gt=0)] = 2_000_000_000
    """Pixels of the images admitted at the same time, by their headers; decoding a million takes
    about 10 ms. One request may have half as many."""
    max_queued_bytes: Annotated[int, Field(gt=0)] = 256 * 2**20
    """Bytes of request bodies in memory at the same time. Further requests are refused before their
    bodies are read."""
    max_json_bytes: Annotated[int, Field(gt=0)] = 32 * 2**20
    """Bytes of JSON in one request's body."""
    max_json_text_bytes: Annotated[int, Field(gt=0)] = 4 * 2**20
    """Bytes of the JSON of one request, not counting numbers and base64 images."""
    max_json_values: Annotated[int, Field(gt=0)] = 1_000_000
    """Values in the JSON of one request; a list, an object or a field counts as ten."""
    max_answer_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20
    """Bytes of one response, except a file. A search over the limit needs a smaller `top` or
    metadata=false."""
    max_unread_bytes: Annotated[int, Field(gt=0)] = 256 * 2**20
    """Bytes of responses in memory at the same time that clients have not read. Further responses
    are refused with 429, except small ones."""
    max_collections: Annotated[int, Field(gt=0)] = 1000
    """Collections that may be created over REST. Existing ones, and those that jobs and commands
    add, are always opened."""
    max_connections: Annotated[int, Field(gt=0)] = 1000
    """Open connections, at most half of the process's limit on open files. For one more connection,
    the server closes one that already has its response, otherwise the one that has waited longest
    for its next request. Sixteen further connections are reserved for health and metrics."""
    max_streams: Annotated[int, Field(gt=0)] = 128
    """Concurrent streams of job events."""
    deadline_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds from a request's first byte until it gets 504."""

    @property
    def max_request_pixels(self) -> int:
        """The limit on the pixels of one request: half of all requests' limit, or one image."""
        return max(self.max_queued_pixels // 2, self.max_pixels)

    @model_validator(mode="after")
    def _check_one_request_fits(self) -> Self:
        for total, part in (
            ("max_queued_bytes", "max_body_bytes"),
            ("max_unread_bytes", "max_answer_bytes"),
            ("max_queued_pixels", "max_pixels"),
            ("max_queued_images", "max_images"),
            ("max_queued_texts", "max_texts"),
            ("max_request_chars", "max_text_chars"),
        ):
            if getattr(self, total) < getattr(self, part):
                raise ValueError(
                    f"{total} must not be less than {part}, got {getattr(self, total)} and"
                    f" {getattr(self, part)}"
                )
        return self


class Auth(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Access to the server."""

    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """The file of `mlcd keys`. With a keys file, every route needs a key, except health, metrics
    and the API documentation."""
    mode: Literal["keys", "open"] = "keys"
    """keys: without a keys file, only clients on this machine are served. open: every client that
    can reach the server may use it."""

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode == "open" and self.keys_file is not None:
            raise ValueError("mode=open must not be combined with a keys file, got both")
        return self


class Tracing(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Tracing by OpenTelemetry, which needs the extra `tracing`."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$")] | None = None
    """URL of a collector, OTLP over HTTP: http://collector:4318. Default: no tracing."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of requests that are traced, if the request has no sampling decision of its own."""


class Reach(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The hosts that the server may send requests to on behalf of its clients."""

    allow: Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_hosts)] = ()
    """Allowed hosts, with commas: example.com, *.example.com (all names below), * (any public
    host). Default: none."""
    networks: Annotated[
        tuple[IPv4Network | IPv6Network, ...], NoDecode, BeforeValidator(parse_networks)
    ] = ()
    """Networks, with commas, in which the allowed hosts may have private addresses: 10.1.0.0/16."""
    ports: Annotated[tuple[int, ...], NoDecode, BeforeValidator(parse_ports)] = (80, 443)
    """Allowed ports, with commas."""

    @model_validator(mode="after")
    def _check_networks_have_named_hosts(self) -> Self:
        if ANY_HOST in self.allow and self.networks:
            raise ValueError(
                "allow=* permits public addresses only: with networks, list the hosts by name"
            )
        return self


class Fetch(Reach, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The fetching of images by URL."""

    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds for all images of a request together."""
    max_redirects: Annotated[int, Field(ge=0, le=10)] = 3
    """Redirects of one URL. Each is checked like the first URL."""
    max_connections: Annotated[int, Field(gt=0, le=256)] = 32
    """Concurrent fetches. Hosts of one domain get at most half of them, hosts of a second domain at
    most half of the rest."""
    max_connections_per_host: Annotated[int, Field(gt=0)] = 8
    """Concurrent fetches from one host."""

    @property
    def url_options(self) -> UrlOptions | None:
        """The options for jobs, with the timeout per response; None if fetching is off."""
        if not self.allow:
            return None
        return JobUrlOptions(
            hosts=",".join(self.allow),
            networks=",".join(map(str, self.networks)),
            ports=",".join(map(str, self.ports)),
            timeout=self.timeout_s,
        )


class Webhooks(Reach, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The allowed hosts of webhooks; webhooks need MLCD_STATE_DIR."""

    ports: Annotated[tuple[int, ...], NoDecode, BeforeValidator(parse_ports)] = (443,)
    """Allowed ports, with commas. For http:// add its port, such as 80."""


class Cache(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The cache of embeddings, in each server process and, with MLCD_REDIS_URL, in Redis."""

    memory_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Bytes per server process for embeddings and their bookkeeping. 0: no cache in the process."""
    ttl_s: Annotated[int, Field(ge=0, le=10 * 365 * 86400)] = 7 * 86400
    """Seconds that Redis keeps an embedding. 0: no cache in Redis, even if other features use
    Redis."""
    redis_bytes: Annotated[int, Field(gt=0)] | None = None
    """No embedding is written while Redis uses more than this many bytes for all its clients.
    Unset: only Redis's own maxmemory counts."""
    timeout_s: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Seconds for a look-up in Redis. A slower look-up counts as a miss."""
    dtype: Literal["float32", "float16"] = "float32"
    """float16 halves the bytes and rounds every embedding, even on a miss. Responses then have the
    header X-Mlcd-Rounded: float16."""


def _parse_roots(value: object) -> list[str]:
    roots = split_list(value)
    for root in roots:
        if not (root.startswith("/") or is_url(root)):
            raise ValueError(f"roots must be absolute paths or URLs, with commas, got {root!r}")
    return roots


def _parse_models(value: object) -> list[str]:
    entries = split_list(value)
    names = []
    for entry in entries:
        name, separator, spec = entry.partition("=")
        if not separator or not spec:
            raise ValueError(f"models must be name=model, with commas, got {entry!r}")
        try:
            names.append(model_name(name))
        except ConfigInvalid as error:
            raise ValueError(str(error)) from error
    if repeated := [name for name, num in Counter(names).items() if num > 1]:
        raise ValueError(f"models must have different names, got {repeated[0]} twice")
    return entries


class Files(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The files of /v1/files and the batches that read them; both need MLCD_STATE_DIR."""

    max_file_bytes: Annotated[int, Field(gt=0)] = 2**31
    """Bytes of one file."""
    max_key_bytes: Annotated[int, Field(gt=0)] = 10 * 2**30
    """Bytes of all files of one API key."""
    max_key_files: Annotated[int, Field(gt=0)] = 10_000
    """Files of one API key."""
    max_bytes: Annotated[int, Field(gt=0)] = 50 * 2**30
    """Bytes of all files of all keys. Beyond it, and on a full disk, uploads get 507."""
    max_archive_entries: Annotated[int, Field(gt=0, le=1_000_000)] = 50_000
    """Entries of an uploaded archive of images."""
    max_archive_bytes: Annotated[int, Field(gt=0)] = 20 * 2**30
    """Bytes of an uploaded archive's entries together, uncompressed."""
    keep_days: Annotated[float, Field(gt=0, le=36500)] = 30.0
    """Days until a file, or a batch that has ended, is removed. An upload may request fewer."""
    max_batch_lines: Annotated[int, Field(gt=0)] = 50_000
    """Requests in one batch."""
    batches_at_once: Annotated[int, Field(ge=1, le=64)] = 4
    """Concurrent batches of one server process. Every key gets its first batch before any key gets
    a second."""
    batch_concurrency: Annotated[int, Field(ge=1, le=1024)] = 32
    """Requests of one batch that are answered at a time."""


class Jobs(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Batch jobs over images that servers and workers can read."""

    roots: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_parse_roots)] = ()
    """Folders or URLs such as s3://bucket/prefix, with commas, that inputs and outputs must be in.
    Every server and worker needs the same value. Default: none, and jobs are off."""
    shard_images: Annotated[int, Field(gt=0)] | None = None
    """Images of one task; a killed worker loses at most one task's work. All workers need the same
    value. Default: a sixteenth of the job, but at least 256 and at most 2,048."""
    lease_s: Annotated[float, Field(ge=2)] = 30.0
    """Seconds of a lease. A task whose worker does not renew it is leased to another worker."""
    stall_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds without progress on a task's images after which a worker counts as hanging: it ends
    with status 1, and the attempt fails. It must be longer than a batch takes."""
    keep_days: Annotated[float, Field(gt=0, le=36500)] = 30.0
    """Days until an ended job is removed from the queue. Its output stays."""
    keep_jobs: Annotated[int, Field(gt=0)] = 5000
    """Ended jobs that the queue keeps. Beyond it, jobs that ended first are removed."""
    redis_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9:._{}-]{1,64}$")] = "mlcd:jobs:"
    """Prefix of the queue's keys in Redis. Deployments that share a database need different
    prefixes."""


class KeptUsage(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The usage of each key by day, in Redis with MLCD_REDIS_URL, else in MLCD_STATE_DIR."""

    keep_days: Annotated[int, Field(ge=1, le=3650)] = 400
    """Days until the counts of a day are removed."""


class Thumbnails(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The thumbnails of items that are added as images or by an `index` job, stored beside each
    collection.
    """

    enabled: bool = True
    """Make thumbnails. Existing thumbnails are always served."""
    side: Annotated[int, Field(ge=32, le=512)] = DEFAULT_SIDE
    """Pixels of the longest side."""
    max_bytes: Annotated[int, Field(ge=0)] = DEFAULT_MAX_BYTES
    """Bytes of the thumbnails of one collection in a folder. Further items get no thumbnail, and
    responses say so; a thumbnail takes about 3 kB."""


class StoredCollections(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The store of collections, if it is not the state directory."""

    store: SecretStr | None = None
    """postgresql://[user[:password]@]host[:port]/database: Postgres with pgvector 0.8 or later;
    milvus://[user[:password]@]host[:port][/database]: Milvus 2.3 or later. With either, several
    servers can write and search concurrently. Unset: folders in the state directory."""

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: SecretStr | None) -> SecretStr | None:
        if store is None or not store.get_secret_value():  # compose passes an unset value as empty
            return None
        if not is_store(store.get_secret_value()):
            raise ValueError(f"a store of collections must be {' or '.join(SHAPES.values())}")
        return store


class Explore(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The pictures that the server groups and names automatically, as `mlcd explore` does."""

    place: Annotated[str, Field(min_length=1)] | None = None
    """A folder, glob, list, tar shards, parquet, zip, or a URL of these. Unset: nothing is
    explored. It needs a state directory and one server process."""
    clusters: Annotated[int, Field(ge=1)] | None = None
    """Number of clusters. Unset: chosen from the pictures."""

    @field_validator("place", mode="before")
    @classmethod
    def _drop_empty(cls, place: object) -> object:
        return place or None  # compose passes an unset value as empty


class Triton(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """NVIDIA's Triton server, which runs the model with MLCD_ENGINE=triton."""

    url: str | None = None
    """HOST:PORT of Triton's gRPC."""
    version: Annotated[int, Field(ge=1)] | None = None
    """Version of the model. Unset: the latest version that is loaded at start."""
    text: str | None = None
    """Folder with tokenizer.json and config.json of the text tower: the version's folder of
    NAME-text in Triton's repository, or a copy. Unset: the server accepts no texts."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds for one inference, including its wait in Triton's queue. A request's own deadline may
    be earlier."""


class Settings(BaseSettings):
    """All settings, as environment variables MLCD_<NAME>, or MLCD_<GROUP>__<NAME> in a group.

    An example is MLCD_LIMITS__MAX_IMAGES.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    model: str
    """starter, a directory of `mlcd export`, other weights that `mlcd export` reads, an .onnx file
    with its JSON, an endpoint openai+https://HOST/v1#NAME, or an encoder without weights: hog,
    pixels."""
    models: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_parse_models)] = ()
    """Further models, NAME=MODEL with commas, that a request chooses by `model`. Each has its own
    engine, limits and centers, and is opened at its first use. Collections, jobs and the page stay
    with MLCD_MODEL."""
    models_idle_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without requests after which a further model is closed."""
    models_memory_bytes: Annotated[int, Field(gt=0)] | None = None
    """Memory of all further models together. To open one beyond it, idle ones are closed. Default:
    half of the memory that the server may use."""
    centers: str | None = None
    """Centers to label with. Default: those in the model's directory."""
    engine: EngineName | Literal["triton", "fake"] = "auto"
    """triton: the Triton server at MLCD_TRITON__URL runs the model named MLCD_MODEL. fake: an
    engine with a fixed latency for load tests, for models fake:… only."""
    precision: Precision = "fp32"
    """int8 needs the graph of `mlcd quantize`; texts are then computed in fp32."""
    exif: ExifPolicy | None = None
    """Overrides how the model's preprocessing treats EXIF orientation tags. It changes the
    fingerprint."""
    decode: DecodeMode | None = None
    """exact or fast (JPEG decoded at a fraction of its size); overrides the model's preprocessing.
    It changes the fingerprint."""
    state_dir: str | None = None
    """The state directory with collections/NAME, made by `mlcd index` or over REST. If it is
    read-only, the server only searches."""
    approximate: bool = False
    """Prepare the approximate labels of /v1/labels?mode=approximate at start. Their recall is
    audited on rows that ship with the centers, or on indexed rows."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs keys or
    MLCD_AUTH__MODE=open."""
    hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_hosts)] = ()
    """Host names, with commas, by which clients may call the server: example.com, *.example.com, *
    (any). Without keys, localhost and loopback addresses are also accepted, and with
    MLCD_AUTH__MODE=open all addresses and names without a dot. With keys and without names here,
    any name is accepted."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on. 0 selects a free port."""
    processes: Annotated[int, Field(ge=1, le=256)] = 1
    """Server processes on one port, each with its own engine, limits and share of the cores."""
    max_batch: Annotated[int, Field(ge=1)] = 32
    """The engine's largest batch, in images."""
    engine_threads: Annotated[int, Field(ge=0)] = 0
    """Threads of an engine on the CPU. 0: one per core that the process may use."""
    decode_threads: Annotated[int, Field(ge=0)] = 0
    """Threads that decode images. 0: one per core."""
    batch_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds after which a batch counts as hanging, if it also takes ten times as long as the
    largest batch at start. The engine is then restarted."""
    drain_s: Annotated[float, Field(ge=0)] = 1.0
    """Seconds after SIGTERM in which the server reports that it is not ready but keeps serving, so
    that the load balancer can notice."""
    grace_s: Annotated[float, Field(ge=0)] = 8.0
    """Seconds after MLCD_DRAIN_S for requests in flight to finish."""
    redis_url: SecretStr | None = None
    """redis://[user:password@]host:port/database, rediss:// or unix://: the primary Redis that
    several servers share, or a name that leads to it. Redis Cluster is not supported."""
    limits: Limits = Limits()
    fetch: Fetch = Fetch()
    auth: Auth = Auth()
    log: Log = Log()
    tracing: Tracing = Tracing()
    cache: Cache = Cache()
    triton: Triton = Triton()
    jobs: Jobs = Jobs()
    files: Files = Files()
    webhooks: Webhooks = Webhooks()
    usage: KeptUsage = KeptUsage()
    collections: StoredCollections = StoredCollections()
    thumbnails: Thumbnails = Thumbnails()
    explore: Explore = Explore()

    @property
    def further_models(self) -> dict[str, str]:
        """The models of MLCD_MODELS, by name."""
        named = (entry.partition("=") for entry in self.models)
        return {name: spec for name, _, spec in named}

    def encoder_options(self, num_threads: int) -> EncoderOptions:
        """Returns the options for opening a model in a process of this machine.

        The engines triton and fake open no model in such a process; for them, the engine is `auto`.
        """
        return EncoderOptions(
            precision=self.precision,
            engine="auto" if self.engine in ("triton", "fake") else cast(EngineName, self.engine),
            num_threads=num_threads,
            exif=self.exif,
            decode=self.decode,
            endpoint_wait_s=ENDPOINT_WAIT_S,
        )

    @model_validator(mode="after")
    def _check_fake(self) -> Self:
        if (self.engine == "fake") != self.model.startswith("fake:"):
            raise ValueError(
                "the engine must be fake if and only if the model is fake:…, got engine"
                f" {self.engine} and model {self.model}"
            )
        return self

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if self.models and (self.engine == "triton" or self.processes > 1):
            raise ValueError(
                "MLCD_MODELS needs one server process with engines of its own, got engine"
                f" {self.engine} and {self.processes} processes"
            )
        return self

    @model_validator(mode="after")
    def _check_explore(self) -> Self:
        if self.explore.place is not None and (self.state_dir is None or self.processes > 1):
            raise ValueError("MLCD_EXPLORE__PLACE needs MLCD_STATE_DIR and one process")
        return self

    @model_validator(mode="after")
    def _check_triton(self) -> Self:
        if (self.engine == "triton") != (self.triton.url is not None):
            raise ValueError(
                "MLCD_TRITON__URL must be set if and only if the engine is triton, got engine"
                f" {self.engine} and {self.triton.url or 'no URL'}"
            )
        if self.triton.text is not None and self.engine != "triton":
            raise ValueError("MLCD_TRITON__TEXT needs engine triton")
        if self.engine == "triton" and self.precision == "int8":
            raise ValueError("precision int8 is not for engine triton, which has its own graph")
        return self


def read_settings(overrides: Mapping[str, Any], *, file: str | None = None) -> Settings:
    """Reads the settings from `file` (lines NAME=value), the environment, which has priority over
    the file, and the command-line options `overrides`, which have priority over both.

    overrides: None is an option that was not given. Raises ConfigInvalid for an unknown MLCD_ name,
    suggesting the nearest known name, and for bad values.
    """
    lines = {} if file is None else _read_lines(file)
    if misplaced := _ENGINE_NAMES & lines.keys():
        raise ConfigInvalid(f"{min(misplaced)} must be set in the environment, got it in {file}")
    names = [name for name in os.environ if name.startswith(_PREFIX)]  # noqa: TID251
    _check_names([*lines, *names])
    try:
        settings = Settings(
            **_nest(lines) | {name: value for name, value in overrides.items() if value is not None}
        )
    except ValidationError as error:
        details = error.errors()[0]
        if details["type"] == "missing":  # `model` is the only setting without a default
            raise ConfigInvalid(
                "--model is required",
                remedy=f"give --model starter, or a model of your own, or set {_PREFIX}MODEL",
            ) from error
        name = _PREFIX + ("__".join(str(part).upper() for part in details["loc"]) or "ENGINE")
        raise ConfigInvalid(
            f"{name}: {details['msg'].removeprefix('Value error, ').lower()}"
        ) from error
    _check_state(settings.state_dir)
    return settings


def _check_state(state_dir: str | None) -> None:
    """Raises ConfigInvalid if the state directory is a collection or a folder of collections."""
    if state_dir is None:
        return
    state = Path(state_dir).absolute()
    if (state / _LEDGER).is_file() and state.parent.name == _COLLECTIONS:
        state = state.parent
    elif state.name != _COLLECTIONS or next(state.glob(f"*/{_LEDGER}"), None) is None:
        return
    raise ConfigInvalid(
        f"the state directory must be the parent of {_COLLECTIONS}/, got a folder below it:"
        f" {state_dir}",
        remedy=f"did you mean {state.parent}?",
    )


def read_keys_file(override: str | None) -> str:
    """Returns the path of the keys file, without reading other settings.

    Raises ConfigInvalid if it is not set.
    """
    name = f"{_PREFIX}AUTH__KEYS_FILE"
    path = override or os.environ.get(name)  # noqa: TID251 - only this module reads it
    if not path:
        raise ConfigInvalid("a keys file is required", remedy=f"give --file or set {name}")
    return path


def setting_names() -> list[str]:
    return [name for name, _, _ in list_fields()]


def list_fields() -> Iterator[tuple[str, tuple[str, ...], FieldInfo]]:
    """Yields name, path in Settings and declaration of every setting, in order."""
    for name, field in Settings.model_fields.items():
        if (nested := group_model(field)) is None:
            yield f"{_PREFIX}{name}".upper(), (name,), field
        else:
            for inner_name, inner_field in nested.model_fields.items():
                path = (name, inner_name)
                yield f"{_PREFIX}{name}__{inner_name}".upper(), path, inner_field


def group_model(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the class of a group of settings; None for a single setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def setting_lines(settings: Settings) -> list[str]:
    """Returns every setting as a line NAME=value for a shell or for `read_settings`.

    Unset settings and secrets are comments.
    """
    lines = []
    for name, path, _ in list_fields():
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
    """Returns a setting's value in the syntax of the environment."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _check_names(names: Iterable[str]) -> None:
    known_names = setting_names()
    for name in names:
        if name not in known_names and name not in _CLIENT_NAMES | _ENGINE_NAMES:
            close = difflib.get_close_matches(name, known_names, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known: {', '.join(known_names)}"
            raise ConfigInvalid(f"unknown setting {name}", remedy=remedy)


def _read_lines(file: str) -> dict[str, str]:
    """Returns names and values of lines NAME=value, quoted as in a shell.

    Raises ConfigInvalid for any other file.
    """
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


def _nest(lines: Mapping[str, str]) -> dict[str, Any]:
    """Returns the lines in the nested form of `Settings`, except settings in the environment."""
    settings: dict[str, Any] = {}
    for name, path, _ in list_fields():
        if name in lines and name not in os.environ:  # noqa: TID251 - only this module reads it
            *groups, field = path
            values = settings
            for group in groups:
                values = values.setdefault(group, {})
            values[field] = lines[name]
    return settings
