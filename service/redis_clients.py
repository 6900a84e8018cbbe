"""Pools of connections to the Redis at MLCD_REDIS_URL, which must be a primary.

After a failover the server behind an open connection may be a replica, and the name of the service
leads to another one. Each connection therefore checks at its start what it is connected to, and an
answer such as READONLY ends it as a lost connection does. Who sees `NotPrimaryError` disconnects
its pool: the next command looks the name up again.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from redis import ConnectionPool, Redis
from redis.asyncio import ConnectionPool as AsyncPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from mlcd.errors import ConfigInvalid
from mlcd.service.timings import QUEUE_CONNECT_S, QUEUE_REDIS_S

_REPLICA: Final = "is a replica, which takes no writes"
_CLUSTER: Final = "is a node of a Redis Cluster, which is not supported"
_SENTINEL: Final = "is a Sentinel, which does not hold data"
_LOADING: Final = "is loading its data"
_NO_REPLICAS: Final = "takes no writes without its replicas"
_STATES: Final[Mapping[type[RedisError], str]] = {
    ReadOnlyError: _REPLICA,
    MasterDownError: _REPLICA,
    BusyLoadingError: _LOADING,
    MovedError: _CLUSTER,
    AskError: _CLUSTER,
    ClusterDownError: _CLUSTER,
    ClusterCrossSlotError: _CLUSTER,
    TryAgainError: _CLUSTER,
}
# Answers for which the client has no class, and those that a script of Redis 6 wraps in its own.
_WORDS: Final = {
    "READONLY": _REPLICA,
    "MASTERDOWN": _REPLICA,
    "UNBLOCKED": _REPLICA,
    "LOADING": _LOADING,
    "NOREPLICAS": _NO_REPLICAS,
    "CLUSTERDOWN": _CLUSTER,
}
_WORD: Final = re.compile(rf"(?:^|\s-)({'|'.join(_WORDS)})\b")

_Pool = TypeVar("_Pool", ConnectionPool, AsyncPool)


class NotPrimaryError(RedisConnectionError):
    """The server takes no writes, and has done nothing: its text says what it is."""


class UnsupportedServerError(NotPrimaryError):
    """The server is of a kind that never becomes a primary: a node of a cluster, or a Sentinel."""


def open_redis_pool(url: str, **options: Any) -> ConnectionPool:
    """Makes a pool for threads. It connects when it is first used, and retries nothing: a write
    whose answer is lost may have been done. Raises ConfigInvalid for a malformed URL.
    """
    return _open_pool(
        ConnectionPool,
        _ThreadedConnection,
        url,
        retry=Retry(NoBackoff(), 0),
        redis_connect_func=_check_server,
        **options,
    )


def open_async_redis_pool(url: str, kind: type[AsyncPool] = AsyncPool, **options: Any) -> AsyncPool:
    """Makes a pool for one event loop, as `open_redis_pool` does for threads."""
    return _open_pool(
        kind,
        _AsyncConnection,
        url,
        retry=AsyncRetry(NoBackoff(), 0),
        redis_connect_func=_check_async_server,
        **options,
    )


def refuse_unsupported_redis(url: str) -> None:
    """Raises ConfigInvalid where the URL leads to a Redis Cluster or to a Sentinel.

    A server that cannot be reached now may be another later, and raises nothing.
    """
    pool = open_redis_pool(
        url, socket_connect_timeout=QUEUE_CONNECT_S, socket_timeout=QUEUE_REDIS_S
    )
    with Redis.from_pool(pool) as client:
        try:
            client.ping()
        except UnsupportedServerError as error:
            raise ConfigInvalid(
                f"the Redis at MLCD_REDIS_URL {error}",
                remedy="name the primary of a Redis without cluster mode, or what leads to it",
            ) from None
        except (RedisError, OSError):
            pass


def _open_pool(kind: type[_Pool], connection: type, url: str, **options: Any) -> _Pool:
    try:
        pool = kind.from_url(url, **options)
    except ValueError:  # its text may quote the password
        raise ConfigInvalid(
            "MLCD_REDIS_URL is not a Redis URL", remedy="write it like redis://host:6379/0"
        ) from None
    # The URL has chosen TCP, TLS or a Unix socket.
    pool.connection_class = type("PrimaryConnection", (connection, pool.connection_class), {})
    return pool


class _ThreadedConnection:
    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except RedisError as error:
            raise _translate(error) from error


class _AsyncConnection:
    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except RedisError as error:
            raise _translate(error) from error


def _check_server(connection: Any) -> None:
    connection.on_connect()
    with suppress(ResponseError):  # Redis before 6, or without the permission
        connection.send_command("HELLO")
        _check_greeting(connection.read_response())


async def _check_async_server(connection: Any) -> None:
    await connection.on_connect()
    with suppress(ResponseError):
        await connection.send_command("HELLO")
        _check_greeting(await connection.read_response())


def _check_greeting(greeting: Any) -> None:
    """Raises NotPrimaryError by the answer to HELLO: a map, or a list of its keys and values."""
    if isinstance(greeting, dict):
        greeting = [word for item in greeting.items() for word in item]
    if not isinstance(greeting, list):
        return
    words = [word.decode() if isinstance(word, bytes) else word for word in greeting]
    facts = dict(zip(map(str, words[::2]), words[1::2], strict=False))
    if facts.get("mode") == "cluster":
        raise UnsupportedServerError(_CLUSTER)
    if facts.get("mode") == "sentinel":
        raise UnsupportedServerError(_SENTINEL)
    if facts.get("role") in ("replica", "slave"):
        raise NotPrimaryError(_REPLICA)


def _translate(error: RedisError) -> RedisError:
    """Returns NotPrimaryError for an answer that says so, else the error itself."""
    state = next((_STATES[kind] for kind in type(error).__mro__ if kind in _STATES), None)
    if state is None and (word := _WORD.search(str(error))):
        state = _WORDS[word[1]]
    return error if state is None else NotPrimaryError(state)
