"""A pipeline behind a cache of its own, and Redis servers that can be stopped, frozen and
filled.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from mlcd.images.decode import DecodeLimits
from mlcd.images.transform import PreprocessSpec
from mlcd.service.inference.cache.cached import CachedPipeline
from mlcd.service.inference.cache.keyspace import KeySpace, redis_prefix
from mlcd.service.inference.cache.memory import MemoryCache
from mlcd.service.inference.cache.redis import RedisCache
from mlcd.service.inference.cache.vectors import VectorFormat
from mlcd.service.inference.served import ServedEncoder
from tests.conftest import free_port

PREFIX = redis_prefix("f" * 64)


def served(**changes):
    given = {"name": "m", "fingerprint": "f" * 64, "dimension": 3, "engine": "openvino"}
    given |= {"precision": "fp32", "preprocess": PreprocessSpec(4, 4), "max_batch": 8}
    return ServedEncoder(**given | {"shortest_s": 0.01, "longest_s": 0.02} | changes)


def space(vectors=None, limits=None, **changes):
    encoder = served(**changes)
    return KeySpace.of_images(
        encoder, vectors or VectorFormat(encoder.dimension), limits or DecodeLimits()
    )


def cached(pipeline, metrics, *, dtype="float32", memory_bytes=10**6, redis=None):
    vectors = VectorFormat(3, dtype)
    return CachedPipeline(
        pipeline,
        space=space(vectors),
        vectors=vectors,
        memory=MemoryCache(memory_bytes, metrics) if memory_bytes else None,
        redis=redis,
        hasher=ThreadPoolExecutor(1),
        metrics=metrics,
    )


def redis_cache(server, metrics, **changes):
    given = {"timeout_s": 0.5, "ttl_s": 60, "max_bytes": None, "metrics": metrics} | changes
    return RedisCache(server.url, PREFIX, VectorFormat(3), **given)


class RedisServer:
    """A real redis-server on a free port, with nothing on disk."""

    def __init__(self, folder, *options):
        self.port, self._folder, self._options = free_port(), folder, options
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self):
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no"]
        log = (self._folder / "redis.log").open("a")
        with log:
            self.process = subprocess.Popen(
                [*command, *self._options], cwd=self._folder, stdout=log, stderr=log
            )
        until_answers = time.monotonic() + 10
        while b"PONG" not in self.ask("PING"):
            assert self.process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < until_answers
            time.sleep(0.02)

    def ask(self, *words):
        """The raw answer to a command in words, empty where nobody answers."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1) as client,
        ):
            client.sendall(" ".join(words).encode() + b"\r\n")
            return client.recv(65536)
        return b""

    def num_keys(self):
        return int(self.ask("DBSIZE").strip(b":\r\n"))

    def stop(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(timeout=10)

    def freeze(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def redis_server(folder, *options):
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.stop()


def cluster_node_options():
    """Returns the options of a node of a Redis Cluster. By default its second port is the first plus
    10,000, which a client may have.
    """
    return ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]


@contextlib.asynccontextmanager
async def listening(serve):
    """A server whose connections are given to serve(reader, writer); its address, as one
    of Redis.
    """
    tasks, writers = set(), set()

    async def connected(reader, writer):
        tasks.add(asyncio.current_task())
        writers.add(writer)
        with contextlib.suppress(OSError):
            await serve(reader, writer)
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        try:
            yield SimpleNamespace(url=f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        finally:
            for writer in writers:
                writer.close()
            if tasks:
                await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def delayed(server):
    """A way to the server on which every answer takes `delay_s` longer."""

    async def pass_on(reader, writer, *, late):
        try:
            while data := await reader.read(65536):
                await asyncio.sleep(way.delay_s if late else 0)
                writer.write(data)
        finally:  # also where the other side was reset, or the way back would wait for ever
            writer.close()

    async def serve(reader, writer):
        upstream, downstream = await asyncio.open_connection("127.0.0.1", server.port)
        both = pass_on(reader, downstream, late=False), pass_on(upstream, writer, late=True)
        await asyncio.gather(*both, return_exceptions=True)
        downstream.close()
        await downstream.wait_closed()

    async with listening(serve) as way:
        way.delay_s = 0.0
        yield way


@contextlib.asynccontextmanager
async def answering(content):
    """Something that listens and is no Redis: it answers whatever it is sent with `content`."""

    async def serve(reader, writer):
        while await reader.read(65536):
            writer.write(content)

    async with listening(serve) as strange:
        yield strange
