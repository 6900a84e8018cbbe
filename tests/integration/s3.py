"""S3 servers that the tests start: those of moto and of s3rver, and one in front of them that fails."""

import errno
import http.client
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from mlcd.artifacts.manifest import MANIFEST, parse_manifest
from tests.conftest import free_port

KEY, SECRET = "S3RVER", "hush-hush-7f3a"
_HERE = "127.0.0.1"
_S3RVER = Path(__file__).parents[1] / "s3rver" / "node_modules" / "s3rver" / "bin" / "s3rver.js"


@dataclass(frozen=True)
class Store:
    """A running server. environment: that of a process that may use it."""

    url: str
    environment: dict[str, str]

    def filesystem(self):
        return fsspec.filesystem(
            "s3",
            key=KEY,
            secret=SECRET,
            endpoint_url=self.url,
            skip_instance_cache=True,
            use_listings_cache=False,
        )


@contextmanager
def running_moto(host: str = _HERE) -> Iterator[Store]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    with _running(command, port, host) as store:
        yield store


@contextmanager
def running_s3rver(folder: Path) -> Iterator[Store]:
    """Another program in another language. It knows no conditional put, and one key."""
    node = shutil.which("node")
    if node is None or not _S3RVER.is_file():
        pytest.skip("s3rver is not installed: make s3rver")
    port = free_port()
    options = ["-d", folder, "-a", _HERE, "-p", port, "-s", "--allow-mismatched-signatures"]
    with _running([node, str(_S3RVER), *map(str, options)], port) as store:
        yield store


@contextmanager
def _running(command: list[str], port: int, host: str = _HERE) -> Iterator[Store]:
    url = f"http://{host}:{port}"
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with listening(command, port, host):
        store = Store(url, environment)
        store.filesystem().mkdir("bucket")
        yield store


@contextmanager
def listening(command: list[str], port: int, host: str = _HERE) -> Iterator[None]:
    """A server, from when it listens on."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not _listens(host, port):
            assert process.poll() is None
            assert time.monotonic() < deadline, f"{command[1]} does not start"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def _listens(host: str, port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex((host, port)) == 0


class Faults(ThreadingHTTPServer):
    """A server in front of another that fails, is slow or refuses. requests, injected: so far."""

    daemon_threads = True

    def __init__(self, behind, *, seed, rate, delay_s, denied):
        super().__init__(("127.0.0.1", 0), _Faulty)
        self.behind, self.rate, self.delay_s, self.denied = behind, rate, delay_s, denied
        self.chance, self.requests, self.injected = random.Random(seed), 0, 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Says nothing: clients that are killed leave their connections."""


class _Faulty(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self):
        server = self.server
        server.requests += 1
        time.sleep(server.delay_s)
        body = self._body()
        if server.denied:
            self._send(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
            return
        fault = server.chance.random()
        if fault > 1 - server.rate / 2:  # a slow read
            server.injected += 1
            time.sleep(0.3)
        if fault < server.rate / 2:
            server.injected += 1
            self._send(503, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        connection = http.client.HTTPConnection(server.behind.removeprefix("http://"))
        with closing(connection):
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content, head = answer.read(), dict(answer.getheaders())
        for name in ("Transfer-Encoding", "Connection"):
            head.pop(name, None)
        if self.command == "HEAD":
            self._send(answer.status, head, b"")
        elif server.rate / 2 < fault < server.rate and content:
            server.injected += 1
            self._send(answer.status, {**head, "Content-Length": str(len(content))}, content[:-1])
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        else:
            self._send(answer.status, {**head, "Content-Length": str(len(content))}, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815 - they are so named

    def _body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            del self.headers["Transfer-Encoding"]
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status, head, content):
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(content)), **head}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        """Says nothing."""


@contextmanager
def running_faults(store, *, seed, rate, delay_s=0.0, denied=False) -> Iterator[Faults]:
    with Faults(store.url, seed=seed, rate=rate, delay_s=delay_s, denied=denied) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def using(store, folder):
    """The store, for this process, which has no copies of anything yet."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        fsspec.filesystem("s3").clear_instance_cache()
        yield store
    fsspec.filesystem("s3").clear_instance_cache()


def check_alike(store, prefix, path, *, has_grown=False):
    """The same files, the same digest, and no note, upload or secret beside them."""
    files = store.filesystem()
    names = {
        name.removeprefix(f"bucket/{prefix}/"): name for name in files.find(f"bucket/{prefix}")
    }
    here = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    assert names.keys() == here.keys()
    for name, file in here.items():
        content = files.cat_file(names[name])
        assert SECRET.encode() not in content
        if name.endswith(MANIFEST):
            there, mine = parse_manifest(content, path), parse_manifest(file.read_bytes(), path)
            assert (there.digest, there.summary) == (mine.digest, mine.summary) or has_grown
        elif not name.startswith("manifest-"):  # with times and paths
            assert content == file.read_bytes(), name
    with _uploads_known():
        assert files.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", []) == []


@contextmanager
def _uploads_known():
    """s3rver cannot list them."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
