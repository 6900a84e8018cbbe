"""A real Milvus, which tests start, stop and kill: `make test-milvus` installs it.

It is the standalone server of the wheel `milvus`, with etcd, its log and its storage in one process.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import httpx
import pytest

# by way of ours, as pymilvus closes pytest's handlers where it is imported by itself
from mlcd.collections.milvus.connection import MilvusClient, MilvusException
from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[1]
WHEEL = ROOT / ".venv-milvus"
PORTS = (
    "proxy_port",
    "proxy_internal_port",
    "etcd_port",
    "root_coord_port",
    "query_coord_port",
    "query_node_port",
    "index_coord_port",
    "index_node_port",
    "data_coord_port",
    "data_node_port",
)
# the wheel writes its settings and unpacks its programs, and says where
PREPARE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import milvus
config = milvus.MilvusServerConfig(**json.loads(sys.argv[2]))
for name, value in json.loads(sys.argv[3]).items():
    config.set(name, value)
config.resolve()
milvus._initialize_data_files(config.base_data_dir)
"""
OPTIONS = {"proxy.timeTickInterval": 20}
FIRST_TOKEN = "root:Milvus"
PROGRAMS = ROOT / ".venv-milvus" / "programs"


class MilvusServer:
    """One server on ports of its own, which keeps its data when it is killed."""

    def __init__(self, password=None):
        """password: of the user root, where users have to be known."""
        self.folder = Path(tempfile.mkdtemp(prefix="mlcd-milvus-"))
        self._token, self._password = "", password
        self._options = OPTIONS | {"authorization_enabled": password is not None}
        self._ports = {name: free_port() for name in PORTS}
        self._metrics_port, self._process = free_port(), None

    def make(self):
        # unpacked once: 200 MB
        PROGRAMS.mkdir(exist_ok=True)
        (self.folder / "bin").symlink_to(PROGRAMS)
        given = json.dumps({"data_dir": str(self.folder), **self._ports})
        subprocess.run(
            [sys.executable, "-c", PREPARE, WHEEL, given, json.dumps(self._options)], check=True
        )
        client, peer = (
            f"http://127.0.0.1:{port}" for port in (self._ports["etcd_port"], free_port())
        )
        (
            self.folder / "etcd.yaml"
        ).write_text(  # without it etcd takes the ports that it always has
            f"name: default\nlisten-client-urls: {client}\nadvertise-client-urls: {client}\n"
            f"listen-peer-urls: {peer}\ninitial-advertise-peer-urls: {peer}\n"
            f"initial-cluster: default={peer}\n"
        )
        self._token = FIRST_TOKEN if self._password else ""
        self.start()
        if self._password:
            client = MilvusClient(self.uri, token=FIRST_TOKEN)
            client.update_password("root", "Milvus", self._password)
            client.close()
            self._token = f"root:{self._password}"

    @property
    def uri(self):
        return f"http://127.0.0.1:{self._ports['proxy_port']}"

    def url(self, database="", credentials=""):
        user = f"{credentials}@" if credentials else ""
        return f"milvus://{user}127.0.0.1:{self._ports['proxy_port']}{database and f'/{database}'}"

    def start(self):
        with (self.folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [self.folder / "bin" / "milvus", "run", "standalone"],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "ETCD_CONFIG_PATH": str(self.folder / "etcd.yaml"),
                    "DEPLOY_MODE": "STANDALONE",
                    "METRICS_PORT": str(self._metrics_port),
                    "LD_LIBRARY_PATH": str(self.folder / "bin"),
                    "MILVUS_RUN_DIR": str(self.folder / "run"),
                },
            )
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                healthy = httpx.get(f"http://127.0.0.1:{self._metrics_port}/healthz").text == "OK"
                if healthy and self._answers():
                    return
            assert time.monotonic() < until, (self.folder / "log").read_text()[-5000:]
            assert self._process.poll() is None, (self.folder / "log").read_text()[-5000:]
            time.sleep(0.2)

    def _answers(self):
        """Tells whether it has read again what it had."""
        with contextlib.suppress(MilvusException, grpc.RpcError):
            client = MilvusClient(self.uri, token=self._token, timeout=5)
            try:
                for name in client.list_collections(timeout=5, retry_times=1):
                    client.query(name, output_fields=["count(*)"], timeout=5, retry_times=1)
            finally:
                client.close()
            return True
        return False

    def prepare(self):
        """Does nothing: it needs nothing."""

    def wait_idle(self):
        """Waits until requests of killed clients have ended."""
        time.sleep(2)

    def kill(self):
        """Kills it with all that runs in it, as a crash would."""
        self._process.kill()
        self._process.wait()

    def remove(self):
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)  # it takes a long time to end by itself
            self._process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)


class MilvusLite:
    """The stand-in that Milvus's makers give for their present API: one process, in Python."""

    def __init__(self, folder):
        self._folder, self._port, self._process = folder, free_port(), None

    def url(self):
        return f"milvus://127.0.0.1:{self._port}"

    def start(self):
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "milvus_lite", "server", "--data-dir", self._folder / "data"),
                    *("--host", "127.0.0.1", "--port", str(self._port)),
                ],
                env={**os.environ, "PYTHONPATH": str(WHEEL)},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            assert time.monotonic() < until, (self._folder / "log").read_text()
            time.sleep(0.1)

    def remove(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def milvus_lite(folder):
    if not WHEEL.is_dir():
        pytest.skip("milvus-lite is not installed (make test-milvus)")
    server = MilvusLite(folder)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@contextlib.contextmanager
def milvus_server(password=None):
    """Starts a server with a shorter tick than the default of 200 ms, for which each reading waits."""
    if not WHEEL.is_dir():
        pytest.skip("the Milvus of the tests is not installed (make test-milvus)")
    server = MilvusServer(password)
    try:
        server.make()
        yield server
    finally:
        server.remove()
