"""Attacks on a real server, on loopback alone, and what everybody else notices of them."""

import contextlib
import socket
import statistics
import threading
import time
from datetime import UTC, datetime

import httpx
import pytest

from mlcd.service.keys.file import create_key
from tests.integration.running import serving


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """(path of the keys file, token of the attacker, token of somebody else)."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    scopes = ("embed", "search", "write", "jobs")
    return path, *(
        create_key(path, name, scopes=scopes, now=datetime.now(UTC))[1]
        for name in ("attacker", "other")
    )


@pytest.fixture(scope="module")
def attacked(tokens, tmp_path_factory):
    """A server with keys, the fake engine and an empty collection, `some`."""
    state = tmp_path_factory.mktemp("state")
    with serving(
        "fake:latency_ms=1", engine="fake", state_dir=state, auth__keys_file=tokens[0]
    ) as server:
        headers = {"Authorization": f"Bearer {tokens[2]}"}
        assert httpx.put(f"{server.url}/v1/collections/some", headers=headers).status_code == 201
        server.model = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"][0]["id"]
        yield server


class Watch:
    """Asks again and again, and keeps the seconds that every answer took, and its status."""

    def __init__(self, ask):
        self._ask = ask
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seconds, self.statuses = [], []

    def _run(self):
        while not self._ended.is_set():
            started = time.perf_counter()
            status = self._ask()
            self.seconds.append(time.perf_counter() - started)
            self.statuses.append(status)
            self._ended.wait(0.005)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def __str__(self):
        middle, longest = statistics.median(self.seconds), max(self.seconds)
        p99 = sorted(self.seconds)[int(0.99 * (len(self.seconds) - 1))]
        return (
            f"{len(self.seconds)} asked: median {middle:.4f} s, p99 {p99:.4f} s, longest "
            f"{longest:.4f} s"
        )


@contextlib.contextmanager
def watched(server, path="/health/live", **request):
    """Measures how another client is served meanwhile, on a connection that stays open."""
    with httpx.Client(base_url=server.url, timeout=30) as client:

        def ask():
            return client.request(request.get("method", "GET"), path, **options).status_code

        options = {name: value for name, value in request.items() if name != "method"}
        ask()
        with Watch(ask) as watch:
            yield watch
        print(f"{path}: {watch}")


@contextlib.contextmanager
def connections(server, num, sent):
    """`num` connections that have sent so much and nothing else."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(num):
            client = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=30)
            )
            client.sendall(sent)
            made.append(client)
        yield made


def request_head(method, path, *lines, token=None):
    given = [f"{method} {path} HTTP/1.1", "Host: localhost", *lines]
    if token is not None:
        given.append(f"Authorization: Bearer {token}")
    return ("\r\n".join(given) + "\r\n\r\n").encode()


def image_head(length, token=None):
    lines = ("Content-Type: image/jpeg", f"Content-Length: {length}")
    return request_head("POST", "/v1/images/embed", *lines, token=token)
