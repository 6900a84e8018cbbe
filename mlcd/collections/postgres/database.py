"""The connections of one process to one Postgres database; translates its errors to ours.

    mlcd.collections   a row per collection: its fixed properties, and the figures of its index
    mlcd.items_N       the items of the collection with the number N (see `items_table`)

Messages show only host, port and database of the URL.
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

# pgvector; in earlier versions, a filtered search ended after the first few results of the index
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
    """The connections and their transactions. All methods are thread-safe."""

    def __init__(self, shown: str, connections: ReusedConnections) -> None:
        """shown: URL without credentials."""
        self.shown, self._connections = shown, connections

    @classmethod
    def open(cls, url: str) -> Self:
        """Connects, and creates missing tables.

        Raises StoreUnreachable, and ConfigInvalid for errors that a retry cannot fix.
        """
        shown = describe_store(url)
        with translate_errors(shown), _connect(url) as connection:
            _prepare(connection, shown)
        return cls(shown, ReusedConnections(lambda: _configure(_connect(url)), _CONNECTIONS))

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """Lends a connection in autocommit mode: each statement is a transaction."""
        with translate_errors(self.shown), self._connections.lend() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Runs the block as a transaction, durable when the block ends."""
        with self.connect() as connection, connection.transaction():
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Runs the block as a read-only transaction with one snapshot."""
        with self.connect() as connection, connection.transaction():
            connection.execute(_SNAPSHOT)
            yield connection

    @contextmanager
    def searching(self) -> Iterator[Connection]:
        """Runs the block as a read-only transaction with one snapshot, and pipelines its statements
        to save network round trips.
        """
        with self.connect() as connection, connection.pipeline(), connection.transaction():
            connection.execute(_SNAPSHOT)
            yield connection

    def loses_writes(self) -> str | None:
        """Returns the server's setting by which acknowledged writes can be lost; None if there is
        none.
        """
        with self.connect() as connection:
            row = connection.execute("SHOW fsync").fetchone()
        return "fsync is off" if row == ("off",) else None

    def close(self) -> None:
        self._connections.close()


def _connect(url: str) -> Connection:
    return psycopg.connect(
        url,
        connect_timeout=_CONNECT_S,
        # Without these limits, a thread would wait 15 minutes for a network that is down.
        tcp_user_timeout=1000 * _SILENT_S,
        keepalives_idle=_SILENT_S // 2,
        keepalives_interval=_SILENT_S // 6,
        keepalives_count=3,
        application_name="mlcd",
        autocommit=True,
    )


def _configure(connection: Connection) -> Connection:
    register_vector(connection)
    # A user or a database may have other defaults.
    connection.execute("SELECT set_config('synchronous_commit', 'on', false)")
    connection.execute("SELECT set_config('hnsw.iterative_scan', 'strict_order', false)")
    connection.execute(
        "SELECT set_config('jit', 'off', false)"
    )  # compiling takes longer than a search
    return connection


def _prepare(connection: Connection, shown: str) -> None:
    """Creates the extension and the tables if they are missing. Raises ConfigInvalid if the user
    may not.
    """
    if _vector_version(connection) is None or not _has_tables(connection):
        with connection.transaction():
            # IF NOT EXISTS fails if another process creates the same object concurrently.
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
    """Translates errors of Postgres to ours, without their text, which may quote data."""
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
            remedy="try again soon after a failover; the URL must lead to the primary server",
        ) from error
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        # `from None`: the error's text may contain the user's name.
        raise _translate_connection_error(shown, error) from None


def _translate_connection_error(shown: str, error: Exception) -> MlcdError:
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
