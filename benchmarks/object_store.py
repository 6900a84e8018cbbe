"""Embedding of tar shards in an S3 server that is 20 ms away, against the same shards on disk.

    python benchmarks/object_store.py ../shared/data/caltech101_20 --model b32 starter

The server is moto's; what stands before it holds every byte back by half of `--delay-ms` on its way
there and on its way back. Both share this machine with the encoder: their CPU time is told, and the
rate that the encoder would have had without it. Runs take turns and begin with the other one each
round; a run opens the shards, lists them and embeds all images, with the engine open before. The
images are those of a folder, several times over.

The memory is the largest of a process (VmHWM) that embeds with the encoder `pixels`, for few images
and for many.
"""

import argparse
import asyncio
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import fsspec
from serve import make_model

from mlcd.cores import available_cores
from mlcd.encoders import open_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.images.quiet import silence_decoders
from mlcd.images.sources import open_source
from mlcd.pipelines.embed import embed
from mlcd.pipelines.resolve import resolve_model
from mlcd.progress import Reporter

SHARDS: Final = 4
PORT: Final = 5599
PEAK: Final = """
import sys
from mlcd.cli import main
try: main()
finally: print(*[l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM")])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("--model", nargs="*", default=["b32", "starter"])
    parser.add_argument("--num", type=int, default=1600, help="images of a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--memory", type=int, nargs="*", default=[4000, 40_000])
    arguments = parser.parse_args()
    silence_decoders()
    with tempfile.TemporaryDirectory() as name, running(arguments.delay_ms) as server:
        folder = Path(name)
        models = {model: model_of(model, folder) for model in arguments.model}
        put(write_shards(folder / "shards", arguments.images, arguments.num), "shards")
        for model, path in models.items():
            with closing(open_encoder(path)) as encoder:
                compare(model, encoder, folder, server, arguments)
        for num in arguments.memory:
            put(write_shards(folder / f"of-{num}", arguments.images, num), f"of-{num}")
            places = {"disk": str(folder / f"of-{num}"), "store": f"s3://bucket/of-{num}"}
            for arm, place in places.items():
                peak = peak_mb(place, folder)
                print(f"pixels   {arm:6} {num} images: at most {peak} MB", flush=True)


def model_of(name: str, folder: Path) -> str:
    if name != "b32":
        return resolve_model(name)
    make_model(folder / "b32")
    return str(folder / "b32" / "model")


def compare(
    name: str, encoder: Encoder, folder: Path, server: "Server", arguments: argparse.Namespace
) -> None:
    """Prints the rates from disk and from the store, and their ratio."""
    arms = {"disk": str(folder / "shards"), "store": "s3://bucket/shards"}
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    server_s = []
    for number in range(1 + arguments.rounds):
        for arm in sorted(arms, reverse=bool(number % 2)):
            fsspec.filesystem("s3").clear_instance_cache()
            before, started = server.cpu_s(), time.monotonic()
            with tempfile.TemporaryDirectory() as out:
                # every run lists the shards itself
                os.environ["XDG_CACHE_HOME"] = f"{out}/cache"  # noqa: TID251 - of the libraries
                embed(open_source(arms[arm]), encoder, Path(out) / "out", Reporter("silent"))
            took_s, used_s = time.monotonic() - started, server.cpu_s() - before
            if number:  # the first round warms up
                rates[arm].append(arguments.num / took_s)
                if arm == "store":
                    server_s.append(used_s / available_cores() / took_s)
    ratios = [store / disk for disk, store in zip(rates["disk"], rates["store"], strict=True)]
    for arm, found in rates.items():
        print(f"{name:8} {arm:6} images/s {spread(found, 1)}")
    print(f"{name:8} ratio  {spread(ratios, 3)}")
    print(f"{name:8} the server's share of all cores meanwhile {spread(server_s, 3)}", flush=True)


def spread(values: list[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def write_shards(folder: Path, images: Path, num: int) -> Path:
    files = sorted(images.rglob("*.jpg"))
    folder.mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(shard, num, SHARDS):
                data = files[number % len(files)].read_bytes()
                info = tarfile.TarInfo(f"{number:06d}.jpg")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return folder


def put(folder: Path, name: str) -> None:
    fsspec.filesystem("s3").put(str(folder), f"bucket/{name}", recursive=True)


def peak_mb(where: str, folder: Path) -> int:
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-c", PEAK, "embed", where, f"{out}/out", "--model", "pixels"]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(made.stdout.split()[-1]) // 1024


class Server:
    """moto and what stands before it."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def cpu_s(self) -> float:
        ticks = 0
        for process in self._processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(delay_ms: float) -> Iterator[Server]:
    """Runs both servers, and tells this process and its children of them."""
    moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(PORT + 1)]
    before = [sys.executable, __file__, "--hold-back", str(delay_ms)]
    quiet = subprocess.DEVNULL
    processes = [subprocess.Popen(each, stdout=quiet, stderr=quiet) for each in (moto, before)]
    os.environ |= {  # noqa: TID251 - s3fs reads it
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        while True:
            with contextlib.suppress(Exception):
                fsspec.filesystem("s3").mkdir("bucket")
                break
            time.sleep(0.2)
        yield Server(processes)
    finally:
        for process in processes:
            process.terminate()
            process.wait()


async def hold_back(delay_s: float) -> None:
    """Passes all bytes on between the two ports, each `delay_s` later."""
    loop = asyncio.get_running_loop()

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

        async def read() -> None:
            data = b"more"
            while data:
                data = await reader.read(1 << 18)
                await late.put((loop.time() + delay_s, data))

        reading = asyncio.create_task(read())
        with contextlib.suppress(OSError):
            while (due_and_data := await late.get())[1]:
                await asyncio.sleep(due_and_data[0] - loop.time())
                writer.write(due_and_data[1])
                await writer.drain()
        reading.cancel()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", PORT + 1)
        await asyncio.gather(passed(reader, behind_writer), passed(behind_reader, writer))

    async with await asyncio.start_server(connected, "127.0.0.1", PORT) as server:
        await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hold-back"]:
        asyncio.run(hold_back(float(sys.argv[2]) / 2000))
    else:
        main()
