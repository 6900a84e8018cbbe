"""The connection of one process to one Milvus, and its errors in our words.

Nothing but this module asks pymilvus for anything. No message shows more of the URL than host, port
and database.
"""

import logging.config
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self, TypeVar

import grpc

from mlcd.collections.milvus.address import MilvusAddress
from mlcd.collections.milvus.graph_kinds import METRIC, Graph
from mlcd.collections.milvus.schemas import PINNED, Schema
from mlcd.errors import ConfigInvalid, Conflict, DiskFull, MlcdError, StoreUnreachable
from mlcd.types import Embeddings


@contextmanager
def _logging_as_it_is() -> Iterator[None]:
    """Keeps a module from configuring logging as it is imported. That closes every handler which
    the process has: a server would log nothing more.
    """

    def ignore(config: Any) -> None:
        pass

    configure, logging.config.dictConfig = logging.config.dictConfig, ignore
    try:
        yield
    finally:
        logging.config.dictConfig = configure


with _logging_as_it_is():
    from pymilvus import DataType, MilvusClient, MilvusException

_CONNECT_S: Final = 5.0
_CALL_S: Final = 120.0  # of a search, a write or a listing; a caller has a deadline of its own
# pymilvus tries 75 times by default, for minutes
_OPTIONS: Final[dict[str, Any]] = {"timeout": _CALL_S, "retry_times": 1}
_STRONG: Final[dict[str, Any]] = {**_OPTIONS, "consistency_level": "Strong"}
_SHORT: Final[dict[str, Any]] = {**_OPTIONS, "consistency_level": "Eventually"}
# pymilvus pings every 10 s over an idle connection, too; servers with gRPC's own rules, milvus-lite
# among them, end one that does
_GRPC: Final = {"grpc.enable_http_proxy": 0, "grpc.keepalive_permit_without_calls": 0}
_NO_COLLECTION: Final = 100  # Milvus's codes
_NO_DATABASE: Final = 800
_TOO_LARGE: Final = ("maxoutputsize", "larger than max", "message size", "exceed")
T = TypeVar("T")
Record = dict[str, Any]


class AnswerTooLarge(Exception):
    """One answer would be larger than Milvus or gRPC allow."""


class MilvusConnection:
    """A connection that is made again after an error. Every method may be called from many threads.

    All names are those of Milvus's collections. Each reading sees what was acknowledged before it
    began (`Strong`), unless it says otherwise.
    """

    def __init__(self, address: MilvusAddress) -> None:
        self.address = address
        self._client: MilvusClient | None = None
        self._connecting = threading.Lock()

    @classmethod
    def open(cls, address: MilvusAddress) -> Self:
        """Connects. Raises StoreUnreachable, and ConfigInvalid where something has to be changed
        first.
        """
        for name in ("pymilvus", "pymilvus.decorators", "pymilvus.client.grpc_handler"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # it logs what we raise
        connection = cls(address)
        connection.names()
        return connection

    def close(self) -> None:
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def names(self) -> list[str]:
        return self._ask(lambda client: list(client.list_collections(**_OPTIONS)))

    def describe(self, name: str) -> Record | None:
        """Returns what Milvus says about a collection or an alias; None where there is none."""
        try:
            return self._ask(lambda client: dict(client.describe_collection(name, **_OPTIONS)))
        except Conflict:
            return None

    def make(self, name: str, schema: Schema, graph: Graph, dimension: int) -> None:
        """Makes a collection with its index; it is not loaded."""

        def ask(client: MilvusClient) -> None:
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
                properties={PINNED: schema.description},  # milvus-lite keeps no description
                **_OPTIONS,
            )
            index = client.prepare_index_params()
            index.add_index(
                "vector", index_type=graph.index_type, metric_type=METRIC, params=graph.build
            )
            client.create_index(name, index, **_OPTIONS)
            for partition in schema.partitions:
                client.create_partition(name, partition, **_OPTIONS)

        self._ask(ask)

    def load(self, name: str) -> None:
        self._ask(lambda client: client.load_collection(name, **_OPTIONS))

    def publish(self, name: str, alias: str) -> None:
        """Gives a collection its alias. Raises Conflict where it is taken."""
        try:
            self._ask(lambda client: client.create_alias(name, alias, **_OPTIONS))
        except StoreUnreachable:
            if self.describe(alias) is None:
                raise
            raise Conflict(f"the alias {alias} is taken") from None

    def withdraw(self, alias: str) -> None:
        self._ask(lambda client: client.drop_alias(alias, **_OPTIONS))

    def drop(self, name: str) -> None:
        self._ask(lambda client: client.drop_collection(name, **_OPTIONS))

    def query(
        self,
        name: str,
        expression: str,
        fields: Sequence[str],
        partition: str,
        *,
        limit: int | None = None,
        fresh: bool = True,
    ) -> list[Record]:
        """Returns the records for which the expression holds, in any order.

        limit: at most so many. fresh: false may miss the last seconds, and does not wait. Raises
        AnswerTooLarge.
        """
        more = {} if limit is None else {"limit": limit}
        records: list[Record] = self._ask(
            lambda client: client.query(
                name,
                filter=expression,
                output_fields=list(fields),
                partition_names=[partition],
                **more,
                **(_STRONG if fresh else _SHORT),
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
        """Returns the nearest records of each query, with these fields. Raises AnswerTooLarge."""
        answers = self._ask(
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
        self._ask(
            lambda client: client.upsert(name, list(records), partition_name=partition, **_OPTIONS)
        )

    def insert(self, name: str, records: Sequence[Record]) -> None:
        self._ask(lambda client: client.insert(name, list(records), **_OPTIONS))

    def delete(self, name: str, expression: str, partition: str) -> None:
        self._ask(
            lambda client: client.delete(
                name, filter=expression, partition_name=partition, **_OPTIONS
            )
        )

    def flush(self, name: str) -> None:
        """Ends the segments that grow, so that Milvus makes their index."""
        self._ask(lambda client: client.flush(name, timeout=10 * _CALL_S))

    def merge(self, name: str) -> int:
        """Begins to merge ended segments into few large ones, and returns the number of the job."""
        return self._ask(lambda client: int(client.compact(name, **_OPTIONS)))

    def is_merged(self, job: int) -> bool:
        state = self._ask(lambda client: str(client.get_compaction_state(job, **_OPTIONS)))
        return state == "Completed"

    def count_unindexed_rows(self, name: str) -> int:
        """Returns how many rows of ended segments are not indexed yet, just merged ones too."""
        facts = self._ask(lambda client: client.describe_index(name, "vector", **_OPTIONS)) or {}
        unindexed = int(facts.get("total_rows", 0)) - int(facts.get("indexed_rows", 0))
        return max(unindexed, int(facts.get("pending_index_rows", 0)))

    def _ask(self, call: Callable[[MilvusClient], T]) -> T:
        with self._translate_errors():
            client = self._connect()
            try:
                return call(client)
            except (MilvusException, grpc.RpcError, OSError, ValueError) as error:
                if not _is_answer(error):
                    self._forget(client)
                raise

    def _connect(self) -> MilvusClient:
        client = self._client
        if client is not None:
            return client
        with self._connecting:
            if self._client is None:
                address = self.address
                # gRPC would try again, and wait longer each time
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
        """Raises the errors of Milvus in our words, without its own: they may quote data."""
        try:
            yield
        except (MlcdError, AnswerTooLarge):
            raise
        except (MilvusException, grpc.RpcError, OSError) as error:
            raise _translation(error, self.address.shown) from None


def _add_types(options: Mapping[str, Any]) -> Record:
    """Returns the options of a field, with a type of Milvus in place of its name."""
    kinds = {name: getattr(DataType, options[name]) for name in options if name == "element_type"}
    return {**options, **kinds}


def _text_of(error: BaseException) -> str:
    """Returns the text of an error and of its cause: pymilvus hides why it cannot connect."""
    both = [error, error.__cause__ or error]  # it raises some from themselves
    messages = (
        failure if isinstance(failure, grpc.RpcError) else getattr(failure, "message", failure)
        for failure in both
    )
    return " ".join(map(str, messages)).lower()


def _is_answer(error: Exception) -> bool:
    """Tells whether Milvus itself refused the request, over a connection that works."""
    return isinstance(error, MilvusException) and "unavailable" not in _text_of(error)


def _translation(error: Exception, shown: str) -> Exception:
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
    return _mistake(text, code, shown) or StoreUnreachable(
        f"{shown} cannot be reached now",
        remedy="see whether Milvus is up and the URL is right; what was acknowledged is kept",
    )


def _mistake(text: str, code: Any, shown: str) -> ConfigInvalid | None:
    """Returns what somebody has to change first."""
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
