"""Pools of connections to the Redis at MLCD_REDIS_URL, which must be a primary.

After a failover, the server of an open connection may be a replica, and the host name may refer to
another server. So each new connection checks its server's role, and an answer such as READONLY ends
a connection like a lost one. On `NotPrimaryError`, the caller disconnects its pool, and the next
command resolves the name again.
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
# Error codes for which the client has no class, or that a script of Redis 6 wraps in its own error.
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
    """The server refuses writes and executed nothing; the text says why."""


class UnsupportedServerError(NotPrimaryError):
    """The server can never become a primary: it is a node of a cluster, or a Sentinel."""


def open_redis_pool(url: str, **options: Any) -> ConnectionPool:
    """Makes a pool for threads. It connects at its first use, and never retries, because a write
    without an answer may have been executed. Raises ConfigInvalid for a malformed URL.
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
    """Makes a pool like `open_redis_pool`, for one event loop."""
    return _open_pool(
        kind,
        _AsyncConnection,
        url,
        retry=AsyncRetry(NoBackoff(), 0),
        redis_connect_func=_check_async_server,
        **options,
    )


def refuse_unsupported_redis(url: str) -> None:
    """Raises ConfigInvalid if the URL leads to a Redis Cluster or a Sentinel; returns if the server
    is unreachable.
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
                remedy="give the primary of a Redis without cluster mode, or a name of it",
            ) from None
        except (RedisError, OSError):
            pass


def _open_pool(kind: type[_Pool], connection: type, url: str, **options: Any) -> _Pool:
    try:
        pool = kind.from_url(url, **options)
    except ValueError:  # its text may quote the password
        raise ConfigInvalid(
            "MLCD_REDIS_URL must be a Redis URL", remedy="write it like redis://host:6379/0"
        ) from None
    # pool.connection_class depends on the URL: TCP, TLS or a Unix socket.
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
    """Raises NotPrimaryError if the answer to HELLO says so.

    greeting: mapping, or list of alternating keys and values.
    """
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
    """Returns NotPrimaryError for an error that says so, otherwise the error itself."""
    state = next((_STATES[kind] for kind in type(error).__mro__ if kind in _STATES), None)
    if state is None and (word := _WORD.search(str(error))):
        state = _WORDS[word[1]]
    return error if state is None else NotPrimaryError(state)
