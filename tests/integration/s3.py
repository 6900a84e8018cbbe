"""S3 servers that the tests start: that of moto, and one in front of it that fails."""

import http.client
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec

from tests.conftest import free_port

SECRET = "hush-hush-7f3a"


@dataclass(frozen=True)
class Store:
    """A running server. environment: that of a process that may use it."""

    url: str
    environment: dict[str, str]

    def filesystem(self):
        return fsspec.filesystem(
            "s3",
            key="tests",
            secret=SECRET,
            endpoint_url=self.url,
            skip_instance_cache=True,
            use_listings_cache=False,
        )


@contextmanager
def running_moto() -> Iterator[Store]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        store, deadline = Store(url, environment), time.monotonic() + 60
        while not _listens(port):
            assert process.poll() is None
            assert time.monotonic() < deadline, "moto does not start"
            time.sleep(0.1)
        store.filesystem().mkdir("bucket")
        yield store
    finally:
        process.terminate()
        process.wait(timeout=30)


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


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
        if fault < server.rate / 2:
            server.injected += 1
            self._send(503, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        connection = http.client.HTTPConnection(server.behind.removeprefix("http://"))
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
