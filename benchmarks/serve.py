r"""The service's speed over HTTP, against its own engine in one process and against infinity-emb.

    python benchmarks/serve.py [--precisions fp32 bf16] [--rounds 3] [--infinity PYTHON]

The arms share one ViT-B/32 with random weights and photographs of 500 x 375 pixels, interleaved:

  engine                batches of 32, and of 1, of prepared pixels: no decoding
  mlcd embed            the same files by its pipeline: decoding in threads, batches of 32
  raw                   32 clients on /v1/images/embed, each with one photograph as the body
  data-URI              32 clients on OpenAI's /v1/embeddings, base64 answers
  alone                 one client, one request at a time, against decode + engine and the engine
  infinity-emb          the same weights, clients and OpenAI bodies, in the environment of PYTHON

A throughput is `--images` answered, from the first byte sent to the last one read. The clients
share the machine with the server. Their share of the CPU is printed, and that of other processes.
These commands make an environment with the peer, outside of this repository:

    python3.11 -m venv ENV
    ENV/bin/pip install torch 'infinity-emb[server,vision]==0.0.77' 'transformers<4.50' \
        'sentence-transformers<4' optimum==1.24.0 'click<8.2' 'typer<0.16' aiohttp
    python benchmarks/serve.py --infinity ENV/bin/python

The file is not called `http`: the folder of a script comes first where Python looks for modules,
those of the standard library too.
"""

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import httpx
import numpy as np
from encode import tower_config, write_model
from overload import CLIENTS, NO_CACHE, Server, free_port
from PIL import Image
from sklearn.datasets import load_sample_images

from mlcd.cores import available_cores, cpu_features, cpuset_cores
from mlcd.encoders import open_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.encoders.unit_rows import MAX_BATCH
from mlcd.images.sources import open_source
from mlcd.pipelines.encoded import encode_entries

SIZE: Final = (500, 375)
PEER: Final = "infinity-emb"
PEER_MODEL: Final = "peer"
RAW, URI = "/v1/images/embed", "/v1/embeddings"
PAUSE_S: Final = 0.3  # seconds; threads of the last engine may spin for a while, waiting for more
START_S: Final = 180.0
MIN_COSINE: Final = 0.999
PRECISIONS: Final = ("fp32", "bf16")


def photographs() -> list[bytes]:
    return [_jpeg(picture) for picture in load_sample_images().images]


def _jpeg(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(SIZE).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@dataclass
class Figures:
    """The figures of every arm, one number per round."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, arm: str, value: float) -> None:
        self.values.setdefault(arm, []).append(value)

    def median(self, arm: str) -> float:
        return statistics.median(self.values[arm])

    def show(self, arm: str, unit: str) -> str:
        found = self.values[arm]
        return f"{self.median(arm):6.4g} {unit} ({min(found):.4g} to {max(found):.4g})"

    def ratio(self, arm: str, base: str) -> str:
        """Returns the ratio of two arms in the same round."""
        found = [
            one / other for one, other in zip(self.values[arm], self.values[base], strict=True)
        ]
        return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


# `work` runs in a process of its own, which `InProcess` starts.


def work(model: str, precision: Any, folder: str) -> None:
    """Answers requests on standard input with JSON lines: images per second, or milliseconds per
    image.
    """
    encoder = open_encoder(model, EncoderOptions(precision=precision))
    source = open_source(folder)
    data = [source.read(entry) for entry in source.entries[:MAX_BATCH]]
    pixels = np.stack([encoder.preprocess.prepare(one) for one in data])
    measures = {
        "engine": partial(_engine_rate, encoder, pixels),
        "embed": lambda: _embed_rate(source, encoder),
        "engine alone": lambda: _median_ms(lambda i: encoder.encode(pixels[i : i + 1])),
        "decode alone": lambda: _median_ms(lambda i: encoder.preprocess.prepare(data[i])),
        "both alone": lambda: _median_ms(
            lambda i: encoder.encode(encoder.preprocess.prepare(data[i])[None])
        ),
        "vector": encoder.encode(pixels[:1])[0].tolist,
    }
    encoder.encode(pixels[:1])
    encoder.encode(pixels)
    for line in sys.stdin:
        print(json.dumps(measures[line.strip()]()), flush=True)


def _engine_rate(encoder: Encoder, pixels: Any, batches: int = 3) -> float:
    started = time.perf_counter()
    for _ in range(batches):
        encoder.encode(pixels)
    return batches * len(pixels) / (time.perf_counter() - started)


def _embed_rate(source: Any, encoder: Encoder) -> float:
    started = time.perf_counter()
    part = encode_entries(
        source, source.entries, encoder, num_threads=available_cores(), on_done=lambda *_: None
    )
    return len(part.entries) / (time.perf_counter() - started)


def _median_ms(run: Any, times: int = 20) -> float:
    taken = []
    for index in range(times):
        started = time.perf_counter()
        run(index)
        taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken)


class InProcess:
    """The engine and its decoders without a server."""

    def __init__(self, model: Path, precision: str, folder: Path) -> None:
        command = [
            sys.executable,
            __file__,
            "--work",
            precision,
            "--model",
            str(model),
            "--folder",
            str(folder),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        self.ask("vector")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


# Clients use plain sockets, because an HTTP library would take a good part of two cores.


def payload(path: str, body: bytes, kind: str, accept: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nAccept: {accept}\r\n"
    )
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def raw_payload(photo: bytes) -> bytes:
    return payload(RAW, photo, "image/jpeg", "application/octet-stream")


def uri_payload(photo: bytes, model: str) -> bytes:
    uri = "data:image/jpeg;base64," + base64.b64encode(photo).decode()
    asked = {"model": model, "input": [uri], "modality": "image", "encoding_format": "base64"}
    return payload(URI, json.dumps(asked).encode(), "application/json", "application/json")


async def exchange(
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], sent: bytes
) -> bytes:
    reader, writer = streams
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    body = await reader.readexactly(
        int(head.partition(b"\r\ncontent-length: ")[2].split(b"\r\n")[0])
    )
    if status != 200:
        raise RuntimeError(f"status {status}: {body[:300].decode()}")
    return body


async def send_all(port: int, payloads: list[bytes], num: int, clients: int) -> list[float]:
    """Returns the seconds of each of `num` requests by clients that each wait for their answer."""
    numbers, taken = iter(range(num)), []

    async def client() -> None:
        streams = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            started = time.perf_counter()
            await exchange(streams, payloads[number % len(payloads)])
            taken.append(time.perf_counter() - started)
        streams[1].close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return taken


@dataclass(frozen=True)
class Served:
    """One running server and its requests; payloads: by the arm that sends them."""

    name: str
    port: int
    pid: int
    payloads: dict[str, list[bytes]]

    def measure(self, figures: Figures, num: int) -> None:
        for arm, payloads in self.payloads.items():
            name = f"{self.name} {arm}"
            before, own, started = cpu_seconds(self.pid), time.process_time(), time.perf_counter()
            asyncio.run(send_all(self.port, payloads, num, CLIENTS))
            seconds = time.perf_counter() - started
            figures.add(name, num / seconds)
            figures.add(
                f"{name} clients", 100 * (time.process_time() - own) / seconds / available_cores()
            )
            for part, after in cpu_seconds(self.pid).items():
                figures.add(f"{name} {part}", 1000 * (after - before[part]) / num)
            time.sleep(PAUSE_S)
            alone = asyncio.run(send_all(self.port, payloads, 20, 1))
            figures.add(f"{name} alone", 1000 * statistics.median(alone))
            time.sleep(PAUSE_S)

    def vector(self) -> Any:
        """Returns the vector of the first photograph."""
        answer = asyncio.run(one_answer(self.port, self.payloads["data-URI"][0]))
        return np.frombuffer(base64.b64decode(json.loads(answer)["data"][0]["embedding"]), "<f4")


async def one_answer(port: int, sent: bytes) -> bytes:
    streams = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await exchange(streams, sent)
    finally:
        streams[1].close()


def cpu_seconds(pid: int) -> dict[str, float]:
    """Returns the CPU seconds of the server's process, and of all below it."""
    return {
        "server": _cpu_seconds(pid),
        "engine": sum(family_cpu_seconds(child) for child in children(pid)),
    }


def family_cpu_seconds(pid: int) -> float:
    return _cpu_seconds(pid) + sum(family_cpu_seconds(child) for child in children(pid))


def children(pid: int) -> list[int]:
    return [
        int(one)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for one in path.read_text().split()
    ]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Others:
    """The CPU share of processes that are not ours; more than a few percent distort the figures."""

    def __init__(self) -> None:
        self._before = self._now()

    def percent(self) -> float:
        """Returns the share since the last call."""
        before, self._before = self._before, self._now()
        (wall, busy, ours), (wall_before, busy_before, ours_before) = self._before, before
        return (
            100 * (busy - busy_before - ours + ours_before) / (wall - wall_before) / cpuset_cores()
        )

    @staticmethod
    def _now() -> tuple[float, float, float]:
        user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:]
        busy = sum(int(ticks) for ticks in (user, nice, system, irq, softirq)) / os.sysconf(
            "SC_CLK_TCK"
        )
        return time.perf_counter(), busy, family_cpu_seconds(os.getpid())


@contextmanager
def our_server(model: Path, precision: str, photos: list[bytes]) -> Iterator[Served]:
    server = Server(str(model), {"MLCD_PRECISION": precision, "MLCD_DRAIN_S": "0", **NO_CACHE})
    try:
        server.wait_ready()
        name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        raw, uri = (
            [raw_payload(photo) for photo in photos],
            [uri_payload(photo, name) for photo in photos],
        )
        yield Served(precision, server.port, server.process.pid, {"raw": raw, "data-URI": uri})
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


@contextmanager
def peer_server(python: Path, hf: Path, folder: Path, photos: list[bytes]) -> Iterator[Served]:
    write_peer_model(hf, folder)
    port = free_port()
    command = [
        str(python.parent / "infinity_emb"),
        "v2",
        "--model-id",
        str(folder),
        "--served-model-name",
        PEER_MODEL,
    ]
    command += ["--engine", "torch", "--device", "cpu", "--url-prefix", "/v1", "--no-model-warmup"]
    command += ["--log-level", "error", "--port", str(port)]
    offline = {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}
    environment = {**os.environ, **offline}  # noqa: TID251 - a child's
    log = (folder / "log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        uri = [uri_payload(photo, PEER_MODEL) for photo in photos]
        wait_listening(process, f"http://127.0.0.1:{port}/health", folder / "log")
        yield Served(PEER, port, process.pid, {"data-URI": uri})
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_listening(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit(f"{PEER} did not start:\n{log.read_text()[-2000:]}")


def write_peer_model(hf: Path, folder: Path) -> None:
    """Writes a CLIP directory around the same tower.

    Its text tower is as small as possible and has random weights.
    """
    vision = json.loads((hf / "config.json").read_text())
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    text = {
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        **ends,
    }
    text |= {
        "num_hidden_layers": 1,
        "projection_dim": vision["projection_dim"],
        "model_type": "clip_text_model",
    }
    config = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": vision["projection_dim"],
    }
    tokens = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    side = vision["image_size"]
    parts = {
        "config.json": {
            **config,
            "vision_config": vision,
            "text_config": text,
            "torch_dtype": "float32",
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "CLIPTokenizer",
            "model_max_length": 77,
            **tokens,
        },
        "vocab.json": {"<|startoftext|>": 0, "<|endoftext|>": 1, "a": 2, "a</w>": 3},
    }
    folder.mkdir()
    for name, content in parts.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "model.safetensors").symlink_to(hf / "model.safetensors")


def make_model(folder: Path) -> None:
    (folder / "weights").mkdir(parents=True)
    write_model(tower_config("b32"), folder / "weights")
    export = [
        sys.executable,
        "-m",
        "mlcd",
        "export",
        str(folder / "weights" / "hf"),
        str(folder / "model"),
    ]
    subprocess.run([*export, "--preprocess", "clip"], check=True, stdout=subprocess.DEVNULL)


def measure_all(
    engines: dict[str, InProcess], servers: list[Served], options: argparse.Namespace
) -> Figures:
    figures, others = Figures(), Others()
    for number in range(options.rounds):
        for precision, engine in engines.items():
            for what in ("engine", "embed", "engine alone", "decode alone", "both alone"):
                figures.add(f"{precision} {what}", engine.ask(what))
                time.sleep(PAUSE_S)
            next(server for server in servers if server.name == precision).measure(
                figures, options.images
            )
        for server in servers:
            if server.name == PEER:
                server.measure(figures, options.images)
        print(
            f"  round {number + 1}: other processes took {others.percent():.1f} % of the CPU",
            flush=True,
        )
    return figures


def check_vectors(engines: dict[str, InProcess], servers: list[Served]) -> None:
    """Checks that all serve the same weights, which a comparison of speed would not notice."""
    for server in servers:
        kind = server.name if server.name in engines else next(iter(engines))
        ours, theirs = np.array(engines[kind].ask("vector")), server.vector()
        cosine = float(ours @ theirs / np.linalg.norm(theirs))
        print(f"  {server.name}: cosine to {kind} in one process {cosine:.6f}")
        if cosine < MIN_COSINE:
            raise SystemExit(f"{server.name} gives another vector")


def show(figures: Figures, precisions: list[str], *, peer: bool) -> None:
    for precision in precisions:
        print(f"{precision}: images/s and ms are medians of the rounds (min to max), ratios too")
        print(
            f"  engine, batch 32, no decoding    {figures.show(f'{precision} engine', 'images/s')}"
        )
        print(
            f"  mlcd embed, decoding included    {figures.show(f'{precision} embed', 'images/s')}"
        )
        for arm in ("raw", "data-URI"):
            _show_arm(figures, precision, arm)
            print(
                "    of mlcd embed's                  "
                f"{figures.ratio(f'{precision} {arm}', f'{precision} embed')}"
            )
        for what, title in (
            ("engine", "engine, batch 1"),
            ("decode", "decoding"),
            ("both", "both"),
        ):
            print(f"  {title:16} in one process  {figures.show(f'{precision} {what} alone', 'ms')}")
        for arm in ("raw", "data-URI"):
            name = f"{precision} {arm} alone"
            both, engine = (
                figures.ratio(name, f"{precision} {base} alone") for base in ("both", "engine")
            )
            print(
                f"  one client, {arm:8} p50         {figures.show(name, 'ms')}: {both} of both, "
                f"{engine} of the engine"
            )
    if peer:
        print(f"{PEER}, torch fp32")
        _show_arm(figures, PEER, "data-URI")
        print(f"  one client, data-URI p50         {figures.show(f'{PEER} data-URI alone', 'ms')}")
        for precision, suffix in itertools.product(precisions, ("", " alone")):
            ours, theirs = f"{precision} data-URI{suffix}", f"{PEER} data-URI{suffix}"
            ratio = figures.ratio(theirs, ours) if suffix else figures.ratio(ours, theirs)
            print(f"  ours in {precision}{', one client' * bool(suffix)}: {ratio} times as fast")


def _show_arm(figures: Figures, name: str, arm: str) -> None:
    cpu = {part: figures.median(f"{name} {arm} {part}") for part in ("server", "engine", "clients")}
    print(
        f"  {CLIENTS} clients, {arm:8}             {figures.show(f'{name} {arm}', 'images/s')}; "
        "CPU per image: server"
        f" {cpu['server']:.1f} ms, its engine {cpu['engine']:.1f} ms; clients {cpu['clients']:.1f} "
        "% of the CPU"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=192, help="Of every throughput.")
    parser.add_argument(
        "--infinity", type=Path, metavar="PYTHON", help="Of an environment with the peer."
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="Where the model is made, or was by an earlier run.",
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.model, options.work, options.folder)
        return
    has_bf16 = bool(cpu_features() & {"AVX512_BF16", "AMX_BF16"})
    precisions = [one for one in options.precisions if one != "bf16" or has_bf16]
    load = os.getloadavg()[0]
    print(
        f"{available_cores()} cores, {', '.join(sorted(cpu_features()))}; load before the run "
        f"{load:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, photos = options.keep or Path(name), photographs()
        images = Path(name) / "images"
        images.mkdir()
        for number in range(options.images):
            (images / f"{number:04}.jpg").write_bytes(photos[number % len(photos)])
        if not (folder / "model").exists():
            make_model(folder)
        engines = {
            one: stack.enter_context(InProcess(folder / "model", one, images)) for one in precisions
        }
        servers = [
            stack.enter_context(our_server(folder / "model", one, photos)) for one in precisions
        ]
        if options.infinity is None:
            print(f"  without {PEER}: --infinity was not given")
        else:
            peer = peer_server(
                options.infinity, folder / "weights" / "hf", Path(name) / "peer", photos
            )
            servers.append(stack.enter_context(peer))
        check_vectors(engines, servers)
        # The first requests compile kernels, grow allocators and start threads.
        for server in servers:
            server.measure(Figures(), 2 * CLIENTS)
        show(measure_all(engines, servers, options), precisions, peer=options.infinity is not None)


if __name__ == "__main__":
    main()
