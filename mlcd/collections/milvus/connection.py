"""The connection of one process to one Milvus server; translates its errors to ours.

Only this module uses pymilvus. Messages show only host, port and database of the URL.
"""

import logging.config
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self, TypeVar

import grpc

from mlcd.collections.milvus.address import MilvusAddress
from mlcd.collections.milvus.index_kinds import METRIC, IndexKind
from mlcd.collections.milvus.schemas import PINNED, Schema
from mlcd.errors import ConfigInvalid, Conflict, DiskFull, MlcdError, StoreUnreachable
from mlcd.types import Embeddings


@contextmanager
def _keep_logging() -> Iterator[None]:
    """Prevents a module from configuring logging on import, which would close all handlers of the
    process: a server would stop logging.
    """

    def ignore(config: Any) -> None:
        pass

    configure, logging.config.dictConfig = logging.config.dictConfig, ignore
    try:
        yield
    finally:
        logging.config.dictConfig = configure


with _keep_logging():
    from pymilvus import DataType, MilvusClient, MilvusException

_CONNECT_S: Final = 5.0
_CALL_S: Final = 120.0  # timeout of each request; callers have deadlines of their own
# By default, pymilvus retries 75 times, for minutes.
_OPTIONS: Final[dict[str, Any]] = {"timeout": _CALL_S, "retry_times": 1}
_STRONG: Final[dict[str, Any]] = {**_OPTIONS, "consistency_level": "Strong"}
_EVENTUAL: Final[dict[str, Any]] = {**_OPTIONS, "consistency_level": "Eventually"}
# By default, pymilvus pings idle connections every 10 s; servers with gRPC's default settings, such
# as milvus-lite, close a connection for that.
_GRPC: Final = {"grpc.enable_http_proxy": 0, "grpc.keepalive_permit_without_calls": 0}
_NO_COLLECTION: Final = 100  # Milvus's codes
_NO_DATABASE: Final = 800
_TOO_LARGE: Final = ("maxoutputsize", "larger than max", "message size", "exceed")
T = TypeVar("T")
Record = dict[str, Any]


class AnswerTooLarge(Exception):
    """The response would be larger than Milvus or gRPC allow."""


class MilvusConnection:
    """A connection that reconnects after an error. All methods are thread-safe.

    All names are names of Milvus collections. Every read sees all writes acknowledged before it
    started (`Strong`), unless documented otherwise.
    """

    def __init__(self, address: MilvusAddress) -> None:
        self.address = address
        self._client: MilvusClient | None = None
        self._connecting = threading.Lock()

    @classmethod
    def open(cls, address: MilvusAddress) -> Self:
        """Connects. Raises StoreUnreachable, or ConfigInvalid if a retry cannot help."""
        for name in ("pymilvus", "pymilvus.decorators", "pymilvus.client.grpc_handler"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # we raise the errors
        connection = cls(address)
        connection.names()
        return connection

    def close(self) -> None:
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def names(self) -> list[str]:
        return self._call(lambda client: list(client.list_collections(**_OPTIONS)))

    def describe(self, name: str) -> Record | None:
        """Returns Milvus's description of a collection or an alias; None if there is none."""
        try:
            return self._call(lambda client: dict(client.describe_collection(name, **_OPTIONS)))
        except Conflict:
            return None

    def make(self, name: str, schema: Schema, index_kind: IndexKind, dimension: int) -> None:
        """Creates a collection with its index, without loading it."""

        def create(client: MilvusClient) -> None:
            milvus_schema = client.create_schema(
                auto_id=False, enable_dynamic_field=False, description=schema.description
            )
            for field_name, (kind, options) in schema.fields.items():
                milvus_schema.add_field(field_name, getattr(DataType, kind), **_add_types(options))
            milvus_schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
            client.create_collection(
                name,
                schema=milvus_schema,
                num_shards=1,
                consistency_level="Strong",
                properties={PINNED: schema.description},  # milvus-lite stores no description
                **_OPTIONS,
            )
            index = client.prepare_index_params()
            index.add_index(
                "vector",
                index_type=index_kind.index_type,
                metric_type=METRIC,
                params=index_kind.build,
            )
            client.create_index(name, index, **_OPTIONS)
            for partition in schema.partitions:
                client.create_partition(name, partition, **_OPTIONS)

        self._call(create)

    def load(self, name: str) -> None:
        self._call(lambda client: client.load_collection(name, **_OPTIONS))

    def publish(self, name: str, alias: str) -> None:
        """Sets the alias of a collection. Raises Conflict if the alias is taken."""
        try:
            self._call(lambda client: client.create_alias(name, alias, **_OPTIONS))
        except StoreUnreachable:
            if self.describe(alias) is None:
                raise
            raise Conflict(f"the alias {alias} is taken") from None

    def withdraw(self, alias: str) -> None:
        self._call(lambda client: client.drop_alias(alias, **_OPTIONS))

    def drop(self, name: str) -> None:
        self._call(lambda client: client.drop_collection(name, **_OPTIONS))

    def query(
        self,
        name: str,
        expression: str,
        fields: Sequence[str],
        partition: str,
        *,
        limit: int | None = None,
        consistent: bool = True,
    ) -> list[Record]:
        """Returns the records that match the expression, in any order.

        limit: maximum number of records. consistent: waits for all earlier writes; otherwise the
        writes of the last seconds may be missed. Raises AnswerTooLarge.
        """
        limit_option = {} if limit is None else {"limit": limit}
        records: list[Record] = self._call(
            lambda client: client.query(
                name,
                filter=expression,
                output_fields=list(fields),
                partition_names=[partition],
                **limit_option,
                **(_STRONG if consistent else _EVENTUAL),
            )
        )
        return list(records)

    def count(self, name: str, expression: str, partition: str) -> int:
        (record,) = self.query(name, expression, ["count(*)"], partition)
        return int(record["count(*)"])

    def search(
        self,
        name: str,
        queries: Embeddings,
        limit: int,
        expression: str,
        params: dict[str, Any],
        fields: Sequence[str],
        partition: str,
    ) -> list[list[Record]]:
        """Returns the given fields of each query's nearest records. Raises AnswerTooLarge."""
        answers = self._call(
            lambda client: client.search(
                name,
                data=list(queries),
                anns_field="vector",
                limit=limit,
                filter=expression,
                search_params=params,
                output_fields=list(fields),
                partition_names=[partition],
                **_STRONG,
            )
        )
        return [
            [{**hit["entity"], "key": hit.get("key", hit.get("id"))} for hit in hits]
            for hits in answers
        ]

    def upsert(self, name: str, records: Sequence[Record], partition: str) -> None:
        self._call(
            lambda client: client.upsert(name, list(records), partition_name=partition, **_OPTIONS)
        )

    def insert(self, name: str, records: Sequence[Record]) -> None:
        self._call(lambda client: client.insert(name, list(records), **_OPTIONS))

    def delete(self, name: str, expression: str, partition: str) -> None:
        self._call(
            lambda client: client.delete(
                name, filter=expression, partition_name=partition, **_OPTIONS
            )
        )

    def flush(self, name: str) -> None:
        """Seals the growing segments, so that Milvus indexes them."""
        self._call(lambda client: client.flush(name, timeout=10 * _CALL_S))

    def merge(self, name: str) -> int:
        """Starts to merge sealed segments into few large ones; returns the id of the job."""
        return self._call(lambda client: int(client.compact(name, **_OPTIONS)))

    def is_merged(self, job: int) -> bool:
        state = self._call(lambda client: str(client.get_compaction_state(job, **_OPTIONS)))
        return state == "Completed"

    def count_unindexed_rows(self, name: str) -> int:
        """Returns how many rows of sealed segments, also of segments just merged, are not indexed
        yet.
        """
        facts = self._call(lambda client: client.describe_index(name, "vector", **_OPTIONS)) or {}
        unindexed = int(facts.get("total_rows", 0)) - int(facts.get("indexed_rows", 0))
        return max(unindexed, int(facts.get("pending_index_rows", 0)))

    def _call(self, request: Callable[[MilvusClient], T]) -> T:
        with self._translate_errors():
            client = self._connect()
            try:
                return request(client)
            except (MilvusException, grpc.RpcError, OSError, ValueError) as error:
                if not _is_response(error):
                    self._forget(client)
                raise

    def _connect(self) -> MilvusClient:
        client = self._client
        if client is not None:
            return client
        with self._connecting:
            if self._client is None:
                address = self.address
                # Fails fast if the server is unreachable; gRPC would retry with backoff.
                socket.create_connection((address.host, address.port), _CONNECT_S).close()
                self._client = MilvusClient(
                    uri=address.uri,
                    token=address.token,
                    db_name=address.database,
                    timeout=_CONNECT_S,
                    grpc_options=_GRPC,
                )
            return self._client

    def _forget(self, client: MilvusClient) -> None:
        with self._connecting:
            if self._client is client:
                self._client = None

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translates errors of Milvus to ours, without their text, which may quote data."""
        try:
            yield
        except (MlcdError, AnswerTooLarge):
            raise
        except (MilvusException, grpc.RpcError, OSError) as error:
            raise _translate(error, self.address.shown) from None


def _add_types(options: Mapping[str, Any]) -> Record:
    """Returns the options of a field, with the name of its element type replaced by the type."""
    kinds = {name: getattr(DataType, options[name]) for name in options if name == "element_type"}
    return {**options, **kinds}


def _text_of(error: BaseException) -> str:
    """Returns the text of an error and of its cause, in which pymilvus has the reason for a failed
    connection.
    """
    errors = [error, error.__cause__ or error]
    messages = (
        entry if isinstance(entry, grpc.RpcError) else getattr(entry, "message", entry)
        for entry in errors
    )
    return " ".join(map(str, messages)).lower()


def _is_response(error: Exception) -> bool:
    """Returns whether Milvus itself returned the error, so that the connection works."""
    return isinstance(error, MilvusException) and "unavailable" not in _text_of(error)


def _translate(error: Exception, shown: str) -> Exception:
    text, code = _text_of(error), getattr(error, "code", None)
    if any(phrase in text for phrase in _TOO_LARGE) and "deadline" not in text:
        return AnswerTooLarge(text)
    if code == _NO_COLLECTION or "collection not found" in text or "can't find coll" in text:
        return Conflict(
            f"a collection in {shown} was deleted meanwhile", remedy="see which there are"
        )
    if "quota" in text and "disk" in text:
        return DiskFull(
            f"the disk of {shown} is full", remedy="free space and send the request again"
        )
    return _find_config_error(text, code, shown) or StoreUnreachable(
        f"{shown} cannot be reached now",
        remedy="see whether Milvus is up and the URL is right; what was acknowledged is kept",
    )


def _find_config_error(text: str, code: Any, shown: str) -> ConfigInvalid | None:
    """Returns the error for a wrong configuration; None for other errors."""
    if code == _NO_DATABASE or "database not found" in text or "database not exist" in text:
        return ConfigInvalid(f"{shown} lacks this database", remedy="create it first")
    if "auth" in text and ("fail" in text or "unauth" in text):
        return ConfigInvalid(
            f"{shown} refuses the user or the password",
            remedy="give them in the URL's setting, or in MILVUS_USER and MILVUS_PASSWORD, or in"
            " MILVUS_TOKEN",
        )
    if "permission" in text or "privilege" in text:
        return ConfigInvalid(
            f"{shown} refuses this user", remedy="grant it all on the collections of the database"
        )
    return None
