"""What the cache saves, and what a Redis that freezes, stops, fills up or is emptied costs, against having none.

    python benchmarks/cache.py [--model MODEL] [--requests 1500] [--rounds 3]

Clients, each waiting for its answer and then for a random while, ask for photographs of 500 x 375 pixels whose bytes
differ; how often each is asked for follows Zipf's law. Every arm of every round has photographs of its own, so that
each begins with an empty cache; the arms take turns, and every ratio is to the arm without a cache of the same round.

    none      no cache
    memory    the cache in the server's process
    redis     the cache in Redis alone, over loopback
    frozen    the same; Redis is frozen (SIGSTOP) half a second after the start
    stopped   the same; Redis is killed
    full      the same; Redis may hold no more (maxmemory, noeviction)
    flushed   the same; Redis is emptied

The engine is a fake one that takes 20 ms for a batch, or what --model names: b32 is a ViT-B/32 of random weights.
Needs redis-server.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import redis
from overload import NO_CACHE, free_port, serving
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from serve import Figures, exchange, make_model, photographs, raw_payload

from mlcd.cores import available_cores

FAKE: Final = "fake:latency_ms=20"
CHAOS_AFTER_S: Final = 0.5
PAUSE_S: Final = 0.3
THINK_S: Final = 0.03
"""On average between two requests of a client: without it all of them end up in one batch, and none is ever late."""
ARMS: Final = ("none", "memory", "redis", "frozen", "stopped", "full", "flushed")


class Redis:
    """A redis-server with nothing on disk."""

    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        options = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--maxmemory-policy",
            "noeviction",
        ]
        self.process = subprocess.Popen(
            ["redis-server", *options], cwd=self._folder, stdout=subprocess.DEVNULL
        )

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def fill(self) -> None:
        """Not a byte more: it refuses writes."""
        self._bound(1)

    def flush(self) -> None:
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def restore(self) -> None:
        """Whatever was done to it."""
        self.process.send_signal(signal.SIGCONT)
        if self.process.poll() is not None:
            self.start()
        self._bound(0)

    def _bound(self, max_bytes: int) -> None:
        with redis.Redis(port=self.port, retry=Retry(ConstantBackoff(0.02), 100)) as client:
            client.config_set("maxmemory", max_bytes)


class Arm:
    """One server of ours and what is done to its Redis while it is measured."""

    def __init__(self, name: str, port: int, server: Redis) -> None:
        self.name, self.port, self._redis = name, port, server

    def measure(self, figures: Figures, trace: list[bytes], clients: int) -> None:
        before = self._encoded()
        chaos = {
            "frozen": self._redis.freeze,
            "stopped": self._redis.stop,
            "full": self._redis.fill,
            "flushed": self._redis.flush,
        }.get(self.name)
        timer = threading.Timer(CHAOS_AFTER_S, chaos) if chaos is not None else None
        if timer is not None:
            timer.start()
        started = time.perf_counter()
        taken = asyncio.run(ask_all(self.port, trace, clients))
        seconds = time.perf_counter() - started
        if timer is not None:
            timer.join()
            self._restore()
        figures.add(f"{self.name} rate", len(trace) / seconds)
        figures.add(f"{self.name} hits", 100 * (1 - (self._encoded() - before) / len(trace)))
        for title, percent in (("p50", 50), ("p99", 99), ("longest", 100)):
            figures.add(f"{self.name} {title}", 1000 * float(np.percentile(taken, percent)))
        figures.add(f"{self.name} mean", 1000 * float(np.mean(taken)))
        time.sleep(PAUSE_S)

    def _restore(self) -> None:
        started = time.perf_counter()
        self._redis.restore()
        while not self._metric("mlcd_cache_up"):
            time.sleep(0.02)
        print(
            f"  {self.name}: in use again {time.perf_counter() - started:.1f} s after it was restored",
            flush=True,
        )

    def _encoded(self) -> float:
        return self._metric("mlcd_batch_size_sum")

    def _metric(self, name: str) -> float:
        lines = httpx.get(f"http://127.0.0.1:{self.port}/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@contextmanager
def running_redis(folder: Path) -> Iterator[Redis]:
    server = Redis(folder)
    try:
        yield server
    finally:
        server.stop()


def open_arms(stack: ExitStack, model: str, server: Redis) -> list[Arm]:
    """Three servers; what happens to Redis happens to the one that uses it."""
    base = {
        "MLCD_DRAIN_S": "0",
        "MLCD_LOG__LEVEL": "warning",
        "MLCD_ENGINE": "fake" if model.startswith("fake:") else "auto",
    }
    in_redis = {"MLCD_REDIS_URL": server.url, "MLCD_CACHE__MEMORY_BYTES": "0"}
    settings = {"none": {**base, **NO_CACHE}, "memory": base, "redis": {**base, **in_redis}}
    ports = {
        name: stack.enter_context(serving(model, given)).port for name, given in settings.items()
    }
    return [Arm(name, ports.get(name, ports["redis"]), server) for name in ARMS]


def payloads(prefix: str, order: list[int]) -> list[bytes]:
    """Requests for photographs by number; bytes after the end of a JPEG make another key of the same picture."""
    photos = photographs()
    made = {
        number: raw_payload(photos[number % len(photos)] + f"{prefix} {number}".encode())
        for number in set(order)
    }
    return [made[number] for number in order]


async def ask_all(port: int, trace: list[bytes], clients: int) -> list[float]:
    """Seconds of each request; raises where one is not answered 200."""
    numbers, taken = iter(range(len(trace))), []
    thinking = np.random.default_rng(1).exponential(THINK_S, len(trace))

    async def client() -> None:
        streams = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            await asyncio.sleep(thinking[number])
            started = time.perf_counter()
            await exchange(streams, trace[number])
            taken.append(time.perf_counter() - started)
        streams[1].close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return taken


def zipf(num_images: int, num: int) -> list[int]:
    shares = 1 / np.arange(1, num_images + 1)
    drawn = np.random.default_rng(0).choice(num_images, num, p=shares / shares.sum())
    return [int(number) for number in drawn]


def show(figures: Figures, arms: list[Arm]) -> None:
    for arm in arms:
        name = arm.name
        print(
            f"  {name:8} {figures.median(f'{name} rate'):7.1f}/s, not encoded {figures.median(f'{name} hits'):5.1f} %;"
            f" p50 {figures.median(f'{name} p50'):6.1f}, p99 {figures.show(f'{name} p99', 'ms')}, longest"
            f" {figures.median(f'{name} longest'):6.1f} ms; of none: mean"
            f" {figures.ratio(f'{name} mean', 'none mean')}, p99 {figures.ratio(f'{name} p99', 'none p99')}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=FAKE)
    parser.add_argument("--requests", type=int, default=1500, help="Of every arm in every round.")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(
        f"{available_cores()} cores; load before the run {os.getloadavg()[0]:.1f}; {options}",
        flush=True,
    )
    order = zipf(options.images, options.requests)
    print(f"  {len(set(order))} different images in {len(order)} requests")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, model = Path(name), options.model
        if model == "b32":
            make_model(folder / "b32")
            model = str(folder / "b32" / "model")
        arms = open_arms(stack, model, stack.enter_context(running_redis(folder)))
        figures = Figures()
        for arm in arms[:3]:  # allocators grown, threads started, kernels compiled
            asyncio.run(ask_all(arm.port, payloads("warm", order[:100]), options.clients))
        for number in range(options.rounds):
            for arm in arms:
                arm.measure(figures, payloads(f"{number} {arm.name}", order), options.clients)
        show(figures, arms)


if __name__ == "__main__":
    main()
