"""The connections of one process to one database, and its errors in our words.

    mlcd.collections   a row for each collection: what it is pinned to, and the figures of its index
    mlcd.items_N       the items of the collection with the number N (see `items_table`)

No message shows more of the URL than host, port and database.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

import psycopg
from pgvector.psycopg import register_vector
from psycopg import errors

from mlcd.collections.postgres.reused_connections import Connection, ReusedConnections
from mlcd.collections.store_urls import describe_store
from mlcd.errors import ConfigInvalid, Conflict, DiskFull, MlcdError, StoreUnreachable

# of pgvector: before it, a search with a filter ended when the index had given its first few
_LEAST_VERSION: Final = (0, 8)
_CONNECTIONS: Final = 16
_CONNECT_S: Final = 5
_SILENT_S: Final = 30
_ADVISORY_LOCK: Final = 0x4D4C4344  # `MLCD`
_SNAPSHOT: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_SCHEMA: Final = """
CREATE SCHEMA IF NOT EXISTS mlcd;
CREATE TABLE IF NOT EXISTS mlcd.collections (
    name text COLLATE "C" PRIMARY KEY,
    number bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    fingerprint text NOT NULL,
    dimension integer NOT NULL,
    recall double precision NOT NULL,
    source jsonb NOT NULL DEFAULT '{}',
    items bigint NOT NULL DEFAULT 0,
    next_row bigint NOT NULL DEFAULT 1,
    revision bigint NOT NULL DEFAULT 0,
    fields text[] NOT NULL DEFAULT '{}',
    generation bigint NOT NULL DEFAULT 0,
    indexed_items bigint NOT NULL DEFAULT 0,
    effort integer,
    audit jsonb
);
"""


class Database:
    """The connections and their transactions. Every method may be called from many threads."""

    def __init__(self, shown: str, connections: ReusedConnections) -> None:
        """shown: the URL without credentials."""
        self.shown, self._kept = shown, connections

    @classmethod
    def open(cls, url: str) -> Self:
        """Connects, and makes the tables where they are missing.

        Raises StoreUnreachable, and ConfigInvalid where something about the database has to be
        changed first.
        """
        shown = describe_store(url)
        with translate_errors(shown), _connect(url) as connection:
            _prepare(connection, shown)
        return cls(shown, ReusedConnections(lambda: _configure(_connect(url)), _CONNECTIONS))

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """Lends a connection, in which each statement is a transaction."""
        with translate_errors(self.shown), self._kept.lend() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Opens a transaction that is on the disk when the block ends, or not at all."""
        with self.connect() as connection, connection.transaction():
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Opens a transaction that sees the database as it is at its first statement."""
        with self.connect() as connection, connection.transaction():
            connection.execute(_SNAPSHOT)
            yield connection

    @contextmanager
    def searching(self) -> Iterator[Connection]:
        """Opens one that also waits for the network as seldom as it can."""
        with self.connect() as connection, connection.pipeline(), connection.transaction():
            connection.execute(_SNAPSHOT)
            yield connection

    def loses_writes(self) -> str | None:
        """Returns the setting by which an acknowledged write can be lost; None where none does."""
        with self.connect() as connection:
            row = connection.execute("SHOW fsync").fetchone()
        return "fsync is off" if row == ("off",) else None

    def close(self) -> None:
        self._kept.close()


def _connect(url: str) -> Connection:
    return psycopg.connect(
        url,
        connect_timeout=_CONNECT_S,
        # a network that is gone says nothing: else a thread would wait for a quarter of an hour
        tcp_user_timeout=1000 * _SILENT_S,
        keepalives_idle=_SILENT_S // 2,
        keepalives_interval=_SILENT_S // 6,
        keepalives_count=3,
        application_name="mlcd",
        autocommit=True,
    )


def _configure(connection: Connection) -> Connection:
    register_vector(connection)
    # a user or a database may have another default
    connection.execute("SELECT set_config('synchronous_commit', 'on', false)")
    connection.execute("SELECT set_config('hnsw.iterative_scan', 'strict_order', false)")
    connection.execute("SELECT set_config('jit', 'off', false)")  # it takes longer than a search
    return connection


def _prepare(connection: Connection, shown: str) -> None:
    """Makes what is missing; a user who may not is told what to do."""
    if _vector_version(connection) is None or not _has_tables(connection):
        with connection.transaction():
            # IF NOT EXISTS fails where another process creates the same at this moment.
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_ADVISORY_LOCK,))
            if _vector_version(connection) is None:
                _create_extension(connection, shown)
            _check_version(connection, shown)
            if not _has_tables(connection):
                connection.execute(_SCHEMA)
    _check_version(connection, shown)


def _create_extension(connection: Connection, shown: str) -> None:
    try:
        connection.execute("CREATE EXTENSION vector")
    except (errors.FeatureNotSupported, errors.UndefinedFile) as error:
        raise ConfigInvalid(
            f"{shown} lacks pgvector", remedy="install pgvector 0.8 or later on its server"
        ) from error
    except errors.InsufficientPrivilege as error:
        raise ConfigInvalid(
            f"{shown} lacks the extension vector, and this user may not create it",
            remedy="run CREATE EXTENSION vector there as a superuser",
        ) from error


def _check_version(connection: Connection, shown: str) -> None:
    version = _vector_version(connection)
    if version is None or version < _LEAST_VERSION:
        raise ConfigInvalid(
            f"{shown} has a pgvector before 0.8",
            remedy="upgrade it, and run ALTER EXTENSION vector UPDATE there",
        )


def _has_tables(connection: Connection) -> bool:
    row = connection.execute("SELECT to_regclass('mlcd.collections') IS NOT NULL").fetchone()
    return row == (True,)


def _vector_version(connection: Connection) -> tuple[int, ...] | None:
    row = connection.execute(
        "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    ).fetchone()
    return tuple(int(part) for part in row[0].split(".")[:2]) if row else None


@contextmanager
def translate_errors(shown: str) -> Iterator[None]:
    """Raises the errors of Postgres in our words, without its own: they may quote data."""
    try:
        yield
    except MlcdError:
        raise
    except errors.DiskFull as error:
        raise DiskFull(
            f"the disk of {shown} is full", remedy="free space and send the request again"
        ) from error
    except (errors.UndefinedTable, errors.UndefinedColumn) as error:
        raise Conflict(
            f"a collection in {shown} was deleted meanwhile", remedy="see which there are"
        ) from error
    except errors.InsufficientPrivilege as error:
        raise ConfigInvalid(
            f"{shown} refuses this user",
            remedy="GRANT it the right to create in the database, or all on the schema mlcd",
        ) from error
    except errors.ReadOnlySqlTransaction as error:
        raise StoreUnreachable(
            f"{shown} takes no writes now",
            remedy="come back soon after a failover; the URL must lead to the primary server",
        ) from error
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise _unreachable(shown, error) from None  # its text may hold the user's name


def _unreachable(shown: str, error: Exception) -> MlcdError:
    text = str(error)
    if "password" in text or "authentication" in text or "pg_hba" in text:
        return ConfigInvalid(
            f"{shown} refuses the user or the password",
            remedy="give them in the URL's setting, or in PGUSER, PGPASSWORD or PGPASSFILE",
        )
    if "does not exist" in text:
        return ConfigInvalid(f"{shown} lacks this database or user", remedy="create it first")
    return StoreUnreachable(
        f"{shown} cannot be reached now",
        remedy="see whether Postgres is up and the URL is right; what was acknowledged is kept",
    )
