r"""What the gateway costs in front of Triton: the real Triton, ViT-B/32 with random weights, 32 clients, interleaved.

    make bundled-triton && python benchmarks/gateway.py [--rounds 3] [--images 256] [--precision fp32]

  direct            tritonclient (gRPC) to Triton: prepared pixels, one image a request
  pixels            KServe's binary protocol (HTTP) to the gateway, the same pixels, which it passes on to Triton
  JPEG              a photograph of 500 x 375 pixels as the body; the gateway decodes
  embedded pixels   the same two, to a server with the embedded engine
  embedded JPEG

Throughputs are `--images` answered; the median of the rounds, with least and most. The clients share the machine with
all servers. It is not called `triton`: torch looks for a module of that name, and would find it beside a script.
"""

import argparse
import asyncio
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from overload import CLIENTS, NO_CACHE, Server, free_port
from PIL import Image
from serve import Figures, Others, exchange, make_model, photographs, raw_payload
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from mlcd.artifacts.manifest import open_artifact
from mlcd.cores import available_cores, cpu_features
from mlcd.images.transform import PreprocessSpec

ROOT: Final = Path(__file__).resolve().parents[1]
TRITON: Final = ROOT / ".venv-triton" / "bin" / "python"
NAME: Final = "mlcd-vit"
START_S: Final = 120.0
MIN_COSINE: Final = 0.999
ARMS: Final = ("direct", "pixels", "JPEG", "embedded pixels", "embedded JPEG")
Send = Callable[[int], Awaitable[Any]]


@contextmanager
def triton(repository: Path, log: Path) -> Iterator[str]:
    """HOST:PORT of its gRPC."""
    ports = {name: free_port() for name in ("grpc", "http", "metrics")}
    options = [f"--{name}-port={port}" for name, port in ports.items()]
    with log.open("w") as out:
        command = [
            str(TRITON),
            str(ROOT / "deploy" / "triton" / "serve.py"),
            str(repository),
            *options,
        ]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_S
        while not _ready(f"http://127.0.0.1:{ports['http']}/v2/models/{NAME}/ready"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Triton did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield f"127.0.0.1:{ports['grpc']}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


@contextmanager
def served(model: str, settings: dict[str, str]) -> Iterator[Server]:
    server = Server(model, {"MLCD_DRAIN_S": "0", **NO_CACHE, **settings})
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


def prepared(model: Path, photos: list[bytes]) -> list[np.ndarray]:
    preprocess = PreprocessSpec.read(open_artifact(model, "model").file("preprocess.json"))
    return [preprocess.apply(Image.open(io.BytesIO(photo)).convert("RGB")) for photo in photos]


def pixel_payload(name: str, pixels: np.ndarray) -> bytes:
    """KServe's binary extension: the JSON, then the tensor."""
    content = pixels.tobytes()
    tensor = {"name": "image_u8", "shape": [1, *pixels.shape], "datatype": "UINT8"}
    asked = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(content)}}]}
    asked["outputs"] = [{"name": "embedding", "parameters": {"binary_data": True}}]  # type: ignore[dict-item]
    header = json.dumps(asked).encode()
    head = f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
    head += f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(header) + len(content)}\r\n\r\n"
    return head.encode() + header + content


async def clients(
    send_of: Callable[[], Awaitable[tuple[Send, Callable[[], Any]]]], num: int
) -> list[float]:
    """Seconds of each of `num` requests by so many clients, each of which waits for its answer."""
    numbers, taken = iter(range(num)), []

    async def client() -> None:
        send, close = await send_of()
        for number in numbers:
            started = time.perf_counter()
            await send(number)
            taken.append(time.perf_counter() - started)
        close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return taken


def over_http(port: int, payloads: list[bytes]) -> Callable[[int], Awaitable[list[float]]]:
    async def connected() -> tuple[Send, Callable[[], Any]]:
        streams = await asyncio.open_connection("127.0.0.1", port)
        return lambda number: exchange(streams, payloads[number % len(payloads)]), streams[1].close

    return lambda num: clients(connected, num)


def over_grpc(url: str, images: list[np.ndarray]) -> Callable[[int], Awaitable[list[float]]]:
    async def run(num: int) -> list[float]:
        async with InferenceServerClient(url) as client:

            async def send(number: int) -> Any:
                pixels = images[number % len(images)][None]
                given = InferInput("image_u8", list(pixels.shape), "UINT8")
                given.set_data_from_numpy(pixels)
                return await client.infer(NAME, [given])

            async def connected() -> tuple[Send, Callable[[], Any]]:
                return send, lambda: None

            return await clients(connected, num)

    return run


def check_vectors(url: str, server: Server, pixels: np.ndarray) -> None:
    """The gateway and Triton answer alike: a comparison of speed alone would not notice."""

    async def direct() -> np.ndarray:
        async with InferenceServerClient(url) as client:
            given = InferInput("image_u8", [1, *pixels.shape], "UINT8")
            given.set_data_from_numpy(pixels[None])
            found: np.ndarray = (await client.infer(NAME, [given])).as_numpy("embedding")[0]
            return found

    async def through() -> np.ndarray:
        streams = await asyncio.open_connection("127.0.0.1", server.port)
        body = await exchange(streams, pixel_payload(NAME, pixels))
        streams[1].close()
        return np.frombuffer(body[-4 * len(expected) :], "<f4")

    expected = asyncio.run(direct())
    cosine = float(expected @ asyncio.run(through()))
    print(f"  cosine of the gateway's vector to Triton's {cosine:.6f}")
    if cosine < MIN_COSINE:
        raise SystemExit("the gateway gives another vector")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=256, help="Of every throughput.")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="Where the model is made, or was by an earlier run.",
    )
    options = parser.parse_args()
    if not TRITON.is_file():
        raise SystemExit("the bundled Triton is not installed: make bundled-triton")
    load = os.getloadavg()[0]
    print(
        f"{available_cores()} cores, {', '.join(sorted(cpu_features()))}; load before the run {load:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, photos = options.keep or Path(name), photographs()
        if not (folder / "model").exists():
            make_model(folder)
        repository = Path(name) / "repository"
        export = [
            sys.executable,
            "-m",
            "mlcd",
            "export",
            str(folder / "model"),
            str(repository),
            "--name",
            NAME,
        ]
        export += ["--format", "triton", "--backend", "python", "--precision", options.precision]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        pixels = prepared(folder / "model", photos)
        url = stack.enter_context(triton(repository, Path(name) / "log"))
        settings = {"MLCD_ENGINE": "triton", "MLCD_TRITON__URL": url}
        gateway = stack.enter_context(served(NAME, settings))
        embedded = stack.enter_context(
            served(str(folder / "model"), {"MLCD_PRECISION": options.precision})
        )
        own_name = open_artifact(folder / "model", "model").config["name"]
        check_vectors(url, gateway, pixels[0])
        raw = [raw_payload(photo) for photo in photos]
        arms = {
            "direct": over_grpc(url, pixels),
            "pixels": over_http(gateway.port, [pixel_payload(NAME, one) for one in pixels]),
            "JPEG": over_http(gateway.port, raw),
            "embedded pixels": over_http(
                embedded.port, [pixel_payload(own_name, one) for one in pixels]
            ),
            "embedded JPEG": over_http(embedded.port, raw),
        }
        figures, others = Figures(), Others()
        for arm in ARMS:  # kernels are compiled, allocators grown, threads started
            asyncio.run(arms[arm](2 * CLIENTS))
        others.percent()
        for number in range(options.rounds):
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                started = time.perf_counter()
                taken = asyncio.run(arms[arm](options.images))
                figures.add(arm, options.images / (time.perf_counter() - started))
                figures.add(f"{arm} p50", 1000 * statistics.median(taken))
                figures.add(f"{arm} p99", 1000 * float(np.quantile(taken, 0.99)))
            print(
                f"  round {number + 1}: other processes took {others.percent():.1f} % of the CPU",
                flush=True,
            )
    print(f"{options.precision}, {CLIENTS} clients")
    for arm in ARMS:
        rates, p50, p99 = (
            figures.show(arm + part, unit)
            for part, unit in (("", "images/s"), (" p50", "ms"), (" p99", "ms"))
        )
        print(f"  {arm:16} {rates}; p50 {p50}; p99 {p99}")
    print(f"  the gateway, of direct: {figures.ratio('pixels', 'direct')} (pixels),")
    print(f"    {figures.ratio('JPEG', 'direct')} (JPEG)")
    print(
        f"  Triton behind it, of the embedded engine: {figures.ratio('pixels', 'embedded pixels')} (pixels),"
    )
    print(f"    {figures.ratio('JPEG', 'embedded JPEG')} (JPEG)")


if __name__ == "__main__":
    main()
