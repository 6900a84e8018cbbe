"""A real server offered several times what it can do: what it still does, and how it refuses the rest.

First the peak: as many clients as keep it busy, each waiting for its answer. Then the overload: requests at a fixed
rate, whether answered or not, each on a connection of its own. The engine is a fake one of fixed latency, so that the
queue alone is measured, then whatever --model names. Prints goodput against the peak of the same run.

    python benchmarks/overload.py --seconds 60 --factor 5 --model demo/model
"""

import argparse
import asyncio
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

FAKE: Final = "fake:latency_ms=100"
FAKE_BATCH: Final = 4
NO_CACHE: Final = {"MLCD_CACHE__MEMORY_BYTES": "0"}  # one photograph is sent all the time
CLIENTS: Final = 32
SETTLE_S: Final = 2.0  # of a run that is not counted: the queue is still filling
RETRY_S: Final = 1.0
ANSWERED, REFUSED, LATE = 200, 429, 504
MIB: Final = 2**20


@dataclass
class Run:
    """seconds: of the counted part. Latencies in seconds, by status."""

    seconds: float
    latencies: dict[int, list[float]] = field(default_factory=dict)
    without_retry_after: int = 0
    broken: int = 0

    def add(self, status: int, latency: float, *, retry_after: bool) -> None:
        self.latencies.setdefault(status, []).append(latency)
        self.without_retry_after += status == REFUSED and not retry_after

    def rate(self, status: int = ANSWERED) -> float:
        return len(self.latencies.get(status, [])) / self.seconds

    def percentile(self, status: int, percent: float) -> float:
        found = self.latencies.get(status)
        return float(np.percentile(found, percent)) if found else 0.0


@dataclass(frozen=True)
class Result:
    """Rates per second, times in seconds."""

    model: str
    deadline_s: float
    peak: float
    offered: float
    goodput: float
    goodput_of_peak: float
    answered_p50_s: float
    answered_p99_s: float
    answered_longest_s: float
    refused: int
    refused_p50_s: float
    refused_p99_s: float
    refused_longest_s: float
    refused_without_retry_after: int
    late: int
    requests: int
    """Counted, whatever became of them."""
    other: dict[str, int]
    loop_lag_p99_s: float
    memory_before_mib: float
    memory_most_mib: float


def jpeg() -> bytes:
    """A photograph of 500 x 375 pixels."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    buffer = io.BytesIO()
    Image.fromarray(load_sample_image("china.jpg")).resize((500, 375)).save(
        buffer, "JPEG", quality=90
    )
    return buffer.getvalue()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


class Server:
    """`mlcd serve` in its own process, and the process of its engine."""

    def __init__(self, model: str, settings: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable,
            "-m",
            "mlcd",
            "serve",
            "--model",
            model,
            "--port",
            str(self.port),
        ]
        environment = {**os.environ, **settings}  # noqa: TID251 - a child's
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process; a line for each request
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=self._log
        )
        self.most_mib = 0.0

    def wait_ready(self) -> None:
        while self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health/ready").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        self._log.seek(0)
        raise SystemExit(f"the server did not start: {self._log.read().decode()}")

    def memory_mib(self) -> float:
        """Resident bytes of the server and its engine, what they share counted twice."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        sizes = [
            int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for pid in (str(self.process.pid), *children)
        ]
        return sum(sizes) * os.sysconf("SC_PAGE_SIZE") / MIB

    def watch_memory(self) -> None:
        while self.process.poll() is None:
            try:
                self.most_mib = max(self.most_mib, self.memory_mib())
            except (OSError, IndexError):
                return
            time.sleep(0.2)

    def lag_p99_s(self) -> float:
        """Upper end of the bucket in which the 99th percentile of the event loop's lag lies."""
        text = httpx.get(f"{self.url}/metrics").text
        buckets = re.findall(r'mlcd_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
        total = float(buckets[-1][1])
        return next(float(edge) for edge, count in buckets if float(count) >= 0.99 * total)


@contextmanager
def serving(model: str, settings: dict[str, str]) -> Iterator[Server]:
    server = Server(model, settings)
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


async def request(port: int, payload: bytes) -> tuple[int, bool]:
    """Status, and whether Retry-After came with it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(payload)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.read()
    finally:
        writer.close()
    return int(head.split(b" ", 2)[1]), b"\r\nretry-after: " in head.lower()


async def measured(run: Run, port: int, payload: bytes, *, counted: bool) -> int | None:
    """The status; None where the connection broke."""
    started = time.perf_counter()
    try:
        status, retry_after = await request(port, payload)
    except (OSError, asyncio.IncompleteReadError):
        run.broken += counted
        return None
    if counted:
        run.add(status, time.perf_counter() - started, retry_after=retry_after)
    return status


async def saturate(port: int, payload: bytes, seconds: float, settle_s: float) -> Run:
    """CLIENTS clients, each sending again when it is answered, and a while later when it is refused."""
    run, start = Run(seconds), time.perf_counter()

    async def client() -> None:
        while (elapsed := time.perf_counter() - start) < settle_s + seconds:
            if await measured(run, port, payload, counted=elapsed >= settle_s) == REFUSED:
                await asyncio.sleep(RETRY_S)  # the peak shall not share the machine with refusals

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return run


async def overload(port: int, payload: bytes, rate: float, seconds: float, settle_s: float) -> Run:
    """`rate` requests per second, whatever becomes of them."""
    run, start = Run(seconds), time.perf_counter()
    tasks = set()
    for number in range(int(rate * (settle_s + seconds))):
        due = start + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(measured(run, port, payload, counted=due - start >= settle_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return run


def compare(
    model: str, settings: dict[str, str], options: argparse.Namespace, *, payload: bytes
) -> Result:
    with serving(
        model, {**settings, "MLCD_LIMITS__DEADLINE_S": str(options.deadline), **NO_CACHE}
    ) as server:
        peak = asyncio.run(saturate(server.port, payload, options.peak_seconds, options.settle))
        before = server.memory_mib()
        threading.Thread(target=server.watch_memory, daemon=True).start()
        rate = options.factor * peak.rate()
        run = asyncio.run(overload(server.port, payload, rate, options.seconds, options.settle))
        other = {
            str(status): len(found)
            for status, found in run.latencies.items()
            if status not in (200, 429, 504)
        }
        return Result(
            model=model,
            deadline_s=options.deadline,
            peak=peak.rate(),
            offered=rate,
            goodput=run.rate(),
            goodput_of_peak=run.rate() / peak.rate(),
            answered_p50_s=run.percentile(ANSWERED, 50),
            answered_p99_s=run.percentile(ANSWERED, 99),
            answered_longest_s=run.percentile(ANSWERED, 100),
            refused=len(run.latencies.get(REFUSED, [])),
            refused_p50_s=run.percentile(REFUSED, 50),
            refused_p99_s=run.percentile(REFUSED, 99),
            refused_longest_s=run.percentile(REFUSED, 100),
            refused_without_retry_after=run.without_retry_after,
            late=len(run.latencies.get(LATE, [])),
            requests=sum(map(len, run.latencies.values())) + run.broken,
            other={**other, **({"broken": run.broken} if run.broken else {})},
            loop_lag_p99_s=server.lag_p99_s(),
            memory_before_mib=before,
            memory_most_mib=server.most_mib,
        )


def show(result: Result) -> None:
    print(
        f"{result.model}: peak {result.peak:.1f} images/s; offered {result.offered:.0f}, goodput {result.goodput:.1f}"
        f" ({result.goodput_of_peak:.0%} of the peak)\n"
        f"  answered: p50 {result.answered_p50_s:.2f} s, p99 {result.answered_p99_s:.2f} s, longest"
        f" {result.answered_longest_s:.2f} s of {result.deadline_s:g} s; past it {result.late} of"
        f" {result.requests} requests; other {result.other}\n"
        f"  refused {result.refused}: p50 {1000 * result.refused_p50_s:.1f} ms, p99 {1000 * result.refused_p99_s:.1f}"
        f" ms, longest {1000 * result.refused_longest_s:.1f} ms, without Retry-After"
        f" {result.refused_without_retry_after}\n"
        f"  event loop late by at most {1000 * result.loop_lag_p99_s:g} ms (p99); memory {result.memory_before_mib:.0f}"
        f" MiB before, at most {result.memory_most_mib:.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--peak-seconds", type=float, default=15.0)
    parser.add_argument("--settle", type=float, default=SETTLE_S)
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--deadline", type=float, default=2.0, help="Of a request, in seconds.")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        help="Beside the fake one; may be given several times.",
    )
    parser.add_argument("--no-fake", action="store_true")
    parser.add_argument("--json", action="store_true", help="One line of JSON per model.")
    options = parser.parse_args()
    photo = jpeg()
    head = f"POST /v1/images/embed HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(photo)}\r\n"
    payload = (
        f"{head}Content-Type: image/jpeg\r\nAccept: application/octet-stream\r\n\r\n".encode()
        + photo
    )
    runs: list[tuple[str, dict[str, Any]]] = [(model, {}) for model in options.model]
    if not options.no_fake:
        runs.insert(0, (FAKE, {"MLCD_ENGINE": "fake", "MLCD_MAX_BATCH": str(FAKE_BATCH)}))
    for model, settings in runs:
        result = compare(model, settings, options, payload=payload)
        print(json.dumps(asdict(result)), flush=True) if options.json else show(result)


if __name__ == "__main__":
    main()
