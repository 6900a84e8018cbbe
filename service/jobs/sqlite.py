"""The queue's database on one machine: SQLite, shared by the processes of servers and workers
there.

jobs      id, columns to find it by (state, fingerprint, due time, number of waiting tasks), record
          (JSON)
events    job, id, view (JSON)
names     idempotency keys and outputs, and the jobs that hold them
sizes     job, shard, images
failures  job, shard, reason (JSON)
beats     heartbeats: worker, model, time of its last report, time until which it counts as live

One connection writes and one reads. Write-ahead log: reads never wait for writes. synchronous=FULL:
a transaction has reached the disk when COMMIT returns.
"""

import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

from mlcd.errors import ArtifactInvalid
from mlcd.service.errors import RecordDamaged
from mlcd.service.jobs.clock import MAX_LATE_DUE, Clock, latest_due_s
from mlcd.service.jobs.database import CANDIDATES, KEPT_EVENTS, Ended, Listed, Result
from mlcd.service.jobs.job import (
    Event,
    Failure,
    JobState,
    StoredJob,
    failure_from_json,
    failure_to_json,
    job_from_json,
    job_to_json,
    record_from_json,
    record_to_json,
)
from mlcd.service.jobs.sqlite_file import RESTORE, SqliteFile
from mlcd.types import Fingerprint

# Version 1 had no failures and no index of ended jobs, version 2 no models of workers; both are
# upgraded.
SCHEMA: Final = 3
_APPLICATION: Final = 0x4D4C434A  # `MLCJ`, the application id of the file
_RECORD: Final = "CAST(record AS BLOB)"  # as bytes: a damaged record may not be UTF-8
_ENDED_AT: Final = "json_extract(record, '$.ended_s')"
_HAS_ENDED: Final = f"due_s IS NULL AND {_ENDED_AT} IS NOT NULL"
_TABLES: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS jobs (
  id TEXT PRIMARY KEY, state TEXT NOT NULL, fingerprint TEXT NOT NULL, due_s REAL,
  waiting INTEGER NOT NULL, created_s REAL NOT NULL, record TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, id);
CREATE INDEX IF NOT EXISTS jobs_due ON jobs (fingerprint, id) WHERE due_s IS NOT NULL;
CREATE TABLE IF NOT EXISTS events (
  job TEXT, id INTEGER, view TEXT NOT NULL, PRIMARY KEY (job, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY, job TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sizes (
  job TEXT, shard INTEGER, images INTEGER NOT NULL, PRIMARY KEY (job, shard)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS failures (
  job TEXT, shard INTEGER, view TEXT NOT NULL, PRIMARY KEY (job, shard)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS jobs_ended ON jobs ({_ENDED_AT}) WHERE {_HAS_ENDED};
CREATE TABLE IF NOT EXISTS beats (
  worker TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, at_s REAL NOT NULL, until_s REAL NOT NULL
) WITHOUT ROWID;
DROP TABLE IF EXISTS workers;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {SCHEMA};
COMMIT;
"""


class SqliteDatabase:
    """A `JobDatabase` in an SQLite file. Processes share the file, threads share this object."""

    def __init__(self, path: Path, *, defer_errors: bool = False) -> None:
        """Opens or creates the file. Raises ArtifactInvalid if it is damaged or not a job queue,
        and Unavailable. defer_errors: log these errors instead; each call then raises them.
        """
        self._path = path
        self._clock = Clock(_wall_s)
        self._file = SqliteFile(path, self._prepare, defer_errors=defer_errors)

    def transact(self, step: Callable[["_SqliteTransaction"], Result]) -> Result:
        with self._file.writing() as connection:
            return step(_SqliteTransaction(connection, self._clock))

    def read(self, job_id: str) -> StoredJob | None:
        rows = self._file.rows(f"SELECT {_RECORD} FROM jobs WHERE id = ?", job_id)  # noqa: S608
        return record_from_json(rows[0][0]) if rows else None

    def due(
        self, fingerprints: Sequence[Fingerprint], *, lease_s: float, exclude: Collection[str] = ()
    ) -> list[str]:
        now_s = self._clock.now_s()
        due = self._live(fingerprints, exclude, f"due_s <= ? ORDER BY id LIMIT {CANDIDATES}", now_s)
        late = f"due_s > ? ORDER BY id LIMIT {MAX_LATE_DUE}"
        return due + self._live(fingerprints, exclude, late, latest_due_s(now_s, lease_s))

    def pending(
        self, fingerprints: Sequence[Fingerprint], *, exclude: Collection[str] = ()
    ) -> bool:
        return bool(self._live(fingerprints, exclude, "1 LIMIT 1"))

    def _live(
        self,
        fingerprints: Sequence[Fingerprint],
        exclude: Collection[str],
        condition: str,
        *values: float,
    ) -> list[str]:
        """Returns ids of jobs with something left to do."""
        rows = self._file.rows(
            "SELECT id FROM jobs WHERE due_s IS NOT NULL"  # noqa: S608
            f" AND fingerprint IN ({_marks(fingerprints)})"
            f" AND id NOT IN ({_marks(exclude)}) AND {condition}",
            *fingerprints,
            *exclude,
            *values,
        )
        return [job_id for (job_id,) in rows]

    def page(self, *, limit: int, below: str | None, state: JobState | None) -> list[Listed]:
        conditions = ["1"] + ["id < ?"] * (below is not None) + ["state = ?"] * (state is not None)
        rows = self._file.rows(
            f"SELECT id, {_RECORD} FROM jobs WHERE {' AND '.join(conditions)}"  # noqa: S608
            " ORDER BY id DESC LIMIT ?",
            *(value for value in (below, state) if value is not None),
            limit,
        )
        return [Listed.of(job_id, record) for job_id, record in rows]

    def events(self, job_id: str, after: int) -> list[Event]:
        rows = self._file.rows(
            "SELECT id, view FROM events WHERE job = ? AND id > ? ORDER BY id", job_id, after
        )
        return [Event(number, job_from_json(view)) for number, view in rows]

    def failures(self, job_id: str, shards: Sequence[int]) -> list[Failure]:
        rows = self._file.rows(
            f"SELECT view FROM failures WHERE job = ? AND shard IN ({_marks(shards)})"  # noqa: S608
            " ORDER BY shard",
            job_id,
            *shards,
        )
        return [failure_from_json(view) for (view,) in rows]

    def find_expired(self, *, max_age_s: float, max_jobs: int, limit: int) -> list[Ended]:
        ended = f"FROM jobs WHERE {_HAS_ENDED}"
        counts = f"SELECT count(*) FILTER (WHERE {_ENDED_AT} <= ?), count(*) {ended}"
        ((num_old, num_ended),) = self._file.rows(counts, self._clock.now_s() - max_age_s)
        num = max(0, min(limit, max(num_old, num_ended - max_jobs)))
        oldest = f"SELECT id, {_ENDED_AT} {ended} ORDER BY {_ENDED_AT} LIMIT ?"
        return [Ended(job_id, ended_s) for job_id, ended_s in self._file.rows(oldest, num)]

    def count(self) -> dict[JobState, int]:
        return dict(self._file.rows("SELECT state, count(*) FROM jobs GROUP BY state"))

    def waiting(self) -> int:
        num: int = self._file.rows(
            "SELECT coalesce(sum(waiting), 0) FROM jobs WHERE due_s IS NOT NULL"
        )[0][0]
        return num

    def oldest_queued_s(self) -> float:
        ((created_s,),) = self._file.rows("SELECT min(created_s) FROM jobs WHERE state = 'queued'")
        return 0.0 if created_s is None else max(0.0, self._clock.now_s() - created_s)

    def heartbeat(self, worker: str, fingerprint: Fingerprint, *, lease_s: float) -> None:
        with self._file.writing() as connection:
            now_s = self._clock.now_s()
            row = (worker, fingerprint, now_s, now_s + lease_s)
            connection.execute("INSERT OR REPLACE INTO beats VALUES (?, ?, ?, ?)", row)
            connection.execute("DELETE FROM beats WHERE until_s <= ? OR at_s > ?", (now_s, now_s))

    def live_workers(self) -> dict[str, Fingerprint]:
        now_s = self._clock.now_s()
        live = (
            "SELECT worker, fingerprint FROM beats WHERE until_s > ? AND at_s <= ? ORDER BY worker"
        )
        return dict(self._file.rows(live, now_s, now_s))

    def close(self) -> None:
        self._file.close()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if (
            connection.execute("PRAGMA application_id").fetchone()[0] not in (0, _APPLICATION)
            or version > SCHEMA
        ):
            raise ArtifactInvalid(
                f"{self._path} is not a job queue of this version", remedy="name another folder"
            )
        if connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
            raise ArtifactInvalid(f"{self._path} is damaged", remedy=RESTORE)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        if version < SCHEMA:
            connection.executescript(_TABLES)


class _SqliteTransaction:
    """See `Transaction`."""

    def __init__(self, connection: sqlite3.Connection, clock: Clock) -> None:
        self._connection, self._clock = connection, clock
        self.now_s = clock.now_s()

    def has_clock_jumped(self, *, within_s: float) -> bool:
        return self._clock.has_clock_jumped(within_s=within_s)

    def record(self, job_id: str) -> StoredJob | None:
        text = self._value(f"SELECT {_RECORD} FROM jobs WHERE id = ?", job_id)  # noqa: S608
        return None if text is None else record_from_json(text)

    def newest_id(self) -> str | None:
        newest: str | None = self._value("SELECT max(id) FROM jobs")
        return newest

    def save(self, record: StoredJob) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                record.id,
                record.state,
                record.spec.fingerprint,
                record.due_s,
                record.waiting,
                record.created_s,
                record_to_json(record).decode(),
            ),
        )

    def remove(self, record: StoredJob) -> None:
        self._connection.execute("DELETE FROM jobs WHERE id = ?", (record.id,))
        for table in ("events", "sizes", "failures"):
            self._connection.execute(f"DELETE FROM {table} WHERE job = ?", (record.id,))  # noqa: S608

    def remove_with_names(self, job_id: str) -> None:
        self._connection.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
        for table in ("events", "sizes", "failures", "names"):
            self._connection.execute(f"DELETE FROM {table} WHERE job = ?", (job_id,))  # noqa: S608

    def publish_event(self, event: Event) -> None:
        job_id = event.job.id
        view = job_to_json(event.job).decode()
        self._connection.execute("INSERT INTO events VALUES (?, ?, ?)", (job_id, event.id, view))
        self._connection.execute(
            "DELETE FROM events WHERE job = ? AND id <= ?", (job_id, event.id - KEPT_EVENTS)
        )

    def holder(self, name: str) -> str | None:
        job_id: str | None = self._value("SELECT job FROM names WHERE name = ?", name)
        return job_id

    def hold(self, name: str, job_id: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO names VALUES (?, ?)", (name, job_id))

    def let_go(self, name: str) -> None:
        self._connection.execute("DELETE FROM names WHERE name = ?", (name,))

    def size_of(self, job_id: str, shard: int) -> int:
        size: int | None = self._value(
            "SELECT images FROM sizes WHERE job = ? AND shard = ?", job_id, shard
        )
        if size is None:
            raise RecordDamaged
        return size

    def set_sizes(self, job_id: str, sizes: Sequence[int]) -> None:
        self._connection.execute("DELETE FROM sizes WHERE job = ?", (job_id,))
        rows = ((job_id, shard, images) for shard, images in enumerate(sizes))
        self._connection.executemany("INSERT INTO sizes VALUES (?, ?, ?)", rows)

    def set_failure(self, job_id: str, failure: Failure) -> None:
        view = failure_to_json(failure).decode()
        self._connection.execute(
            "INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", (job_id, failure.shard, view)
        )

    def _value(self, query: str, *values: object) -> Any:
        row = self._connection.execute(query, values).fetchone()
        return None if row is None else row[0]


def _wall_s() -> float:
    return time.time()


def _marks(values: Collection[object]) -> str:
    return ",".join("?" * len(values))
