"""Milliseconds per image of the service's engine and batcher, for embeddings and for labels.

    python benchmarks/labels_service.py [--device cuda] [--tower b32] [--centers 1000000]
                                        [--dimension 768] [--batches 1 32 256] [--images 4096]

A random tower and random centers, in the engine's process as `mlcd serve` starts it; the requests
come from this process, without HTTP and decoding. Embeddings and labels take turns, with the same
noise; a request has as many images as a batch, and four are in flight. The labels of one batch must
have the bytes of the server's own scan, or the exit status is 1.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from assign import in_blocks
from encode import random_model, tower_config

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request
from mlcd.encoders.options import EncoderOptions
from mlcd.service.inference.batcher import MicroBatcher
from mlcd.service.inference.engine.supervised import SupervisedEngine
from mlcd.service.inference.engine_labels import EngineLabels
from mlcd.service.inference.lookup import Lookup
from mlcd.service.inference.served import EngineOptions, ServedEncoder
from mlcd.service.log import Log
from mlcd.service.telemetry.metrics import Metrics
from mlcd.types import Embeddings, ImageBatch, Neighbors, unit_rows

_TOP: Final = 8
_IN_FLIGHT: Final = 4  # requests
_SEARCH_THREADS: Final = 4
_TIMEOUT_S: Final = 120.0


class Client:
    """Sends requests to a batcher, as the routes of the service do."""

    def __init__(self, batcher: MicroBatcher, lookup: Lookup) -> None:
        self._batcher, self._lookup = batcher, lookup
        self._threads = ThreadPoolExecutor(_SEARCH_THREADS)
        self.num_labeled = self.num_by_engine = 0

    async def embed(self, images: ImageBatch) -> Embeddings:
        request = object()
        rows = await asyncio.gather(
            *(self._batcher.encode(image, request=request) for image in images)
        )
        return np.stack([row.embedding for row in rows])

    async def label(self, images: ImageBatch) -> tuple[Embeddings, Neighbors]:
        labels = EngineLabels(self._lookup.centers.digest, _TOP)
        with labels.request():
            embeddings = await self.embed(images)
        loop = asyncio.get_running_loop()
        neighbors = await loop.run_in_executor(
            self._threads,
            lambda: self._lookup.nearest(embeddings, _TOP, engine_labels=labels),
        )
        self.num_labeled += len(images)
        self.num_by_engine += labels.num_used
        return embeddings, neighbors

    async def seconds(self, images: ImageBatch, batch: int, *, labeled: bool) -> float:
        """Returns the time of all images, in requests of `batch`."""
        places = asyncio.Semaphore(_IN_FLIGHT)

        async def send(start: int) -> None:
            async with places:
                part = images[start : start + batch]
                await (self.label(part) if labeled else self.embed(part))

        began = time.perf_counter()
        await asyncio.gather(*map(send, range(0, len(images), batch)))
        return time.perf_counter() - began


async def measure(options: argparse.Namespace, folder: Path) -> bool:
    """Prints the times, and tells whether the labels are those of the server's own scan."""
    model, centers = write_model(options, folder), write_centers(options, folder)
    lookup = Lookup(Centers.open(centers))
    precision = "bf16" if options.device == "cuda" else "fp32"
    engine = SupervisedEngine(
        EngineOptions(
            str(model),
            max(options.batches),
            EncoderOptions(engine="torch", precision=precision),
            Log(),
            centers=str(centers),
            centers_device=options.device,
        ),
        batch_timeout_s=_TIMEOUT_S,
    )
    async with engine:
        served = engine.served
        assert isinstance(served, ServedEncoder)
        found_by = "engine" if engine.labels_of == lookup.centers.digest else "server"
        print(
            f"{options.tower} in {served.precision} on {options.device}, {options.centers} centers"
            f" of {options.dimension}, top {_TOP}: labels by the {found_by}"
        )
        shape = (options.images, *served.item.shape)
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        metrics = Metrics(**served.labels, multiprocess_dir=None)
        all_same = True
        for batch in options.batches:
            batcher = MicroBatcher(
                engine, max_batch=batch, max_queued=2 * len(images), metrics=metrics
            )
            async with batcher:
                client = Client(batcher, lookup)
                # fewer single images, of which each takes longer
                sent = images[: len(images) // 16] if batch == 1 else images
                await compare(client, sent, batch, options.runs)
                all_same &= await agree(client, lookup, images[:batch])
        return all_same


async def compare(client: Client, images: ImageBatch, batch: int, runs: int) -> None:
    times: dict[bool, list[float]] = {False: [], True: []}
    for run in range(-1, runs):  # the first run warms up, and records graphs
        for labeled, measured in times.items():
            taken = await client.seconds(images, batch, labeled=labeled)
            measured.extend([1e3 * taken / len(images)] if run >= 0 else [])
    embedding, labels = (statistics.median(each) for each in times.values())
    share = client.num_by_engine / client.num_labeled
    print(
        f"  batch {batch:4} embeddings {spread(times[False])}, labels {spread(times[True])} ms per"
        f" image: labels add {(labels - embedding) / embedding:.2f} of the embedding; the engine"
        f" found {share:.2%}"
    )


def spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.4f} ({min(times):.4f} to {max(times):.4f})"


async def agree(client: Client, lookup: Lookup, images: ImageBatch) -> bool:
    """Tells, and prints, if the labels have the bytes of the server's own scan."""
    embeddings, found = await client.label(images)
    own = lookup.nearest(embeddings, _TOP)
    same = found.ids.tobytes() == own.ids.tobytes()
    same &= found.scores.tobytes() == own.scores.tobytes()
    print(f"  labels of {len(images)} images have the bytes of the server's scan: {same}")
    return same


def write_model(options: argparse.Namespace, folder: Path) -> Path:
    model = random_model(replace(tower_config(options.tower), embedding_dim=options.dimension))
    request = Request("model", {"name": "random"}, (), model.fingerprint())
    with Draft(folder / "model", request) as draft:
        model.write(draft.path)
        draft.publish()
    return folder / "model"


def write_centers(options: argparse.Namespace, folder: Path) -> Path:
    shape = (options.centers, options.dimension)
    vectors = in_blocks(shape, lambda _, noise: unit_rows(noise))
    sizes = np.ones(len(vectors), np.int64)
    request = Request("centers", {}, (), "0" * 64)
    with Draft(folder / "centers", request) as draft:
        Centers(vectors, sizes, "0" * 64).write(draft)
        draft.publish()
    return folder / "centers"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tower", choices=["tiny", "b32", "l14"], default="b32")
    parser.add_argument("--centers", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if asyncio.run(measure(options, Path(folder))) else 1)


if __name__ == "__main__":
    main()
