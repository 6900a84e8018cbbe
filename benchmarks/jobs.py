r"""Images per second of a label job, against the encoder alone and by two workers; a worker's
memory.

    python benchmarks/jobs.py --model MODEL [--images 512] [--rounds 3] [--sizes 5000 20000]

MODEL is the result of `mlcd export`. Photographs of 500 x 375 pixels in tar shards are labeled by
one `mlcd worker` with 1,000 centers. The peer is the model in a process of its own, on batches of
pixels that were decoded beforehand. That is the speed of a job if reading, decoding, labeling and
writing took no time. Both are interleaved. A job counts from its first task to its manifest. One
worker and two are compared with engines of one thread each. The memory is the largest of a worker
(VmHWM). It is measured with the encoder `pixels`, so that it takes minutes: the engine's own memory
does not depend on the number of images, because it sees batches of 32.

With --batches a server labels the same photographs as two batches of /v1/labels, interleaved with
the label job: JSONL with a data-URI a line, and an uploaded archive. A batch counts from its first
request to its end.
"""

import argparse
import base64
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request, open_artifact
from mlcd.encoders import open_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.encoders.unit_rows import MAX_BATCH
from mlcd.service.jobs.job import Job, JobSpec
from mlcd.service.jobs.queue import Queue
from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
from mlcd.types import unit_rows

SIZE: Final = (500, 375)
SMALL: Final = (125, 94)
NUM_CENTERS: Final = 1000
SHARD_IMAGES: Final = 5000  # images of a tar file
LOOK_S: Final = 0.05


def photographs(size: tuple[int, int]) -> list[bytes]:
    found = []
    for picture in load_sample_images().images:
        buffer = io.BytesIO()
        Image.fromarray(picture).resize(size).save(buffer, "JPEG", quality=90)
        found.append(buffer.getvalue())
    return found


def write_shards(folder: Path, num: int, size: tuple[int, int]) -> str:
    """Writes `num` photographs to tar files and returns their glob."""
    folder.mkdir()
    pictures = photographs(size)
    for start in range(0, num, SHARD_IMAGES):
        with tarfile.open(folder / f"{start:08d}.tar", "w") as tar:
            for number in range(start, min(start + SHARD_IMAGES, num)):
                data = pictures[number % len(pictures)]
                member = tarfile.TarInfo(f"{number:08d}.jpg")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return str(folder / "*.tar")


def write_centers(encoder: Encoder, out: Path) -> str:
    """Writes random centers in the encoder's space and returns their digest."""
    vectors = unit_rows(np.random.default_rng(0).standard_normal((NUM_CENTERS, encoder.dimension)))
    with Draft(out, Request("centers", fingerprint=encoder.fingerprint)) as draft:
        Centers(vectors, np.ones(NUM_CENTERS, np.int64), encoder.fingerprint).write(draft)
        return draft.publish().digest


@dataclass(frozen=True)
class Site:
    """A queue, and the inputs of its jobs."""

    folder: Path
    model: str
    fingerprint: str
    centers: str
    queue: Queue

    @classmethod
    def build(cls, folder: Path, model: str) -> "Site":
        folder.mkdir()
        encoder = open_encoder(model)
        centers = write_centers(encoder, folder / "centers")
        queue = open_queue(read_settings({"model": model, "state_dir": str(folder)}))
        site = cls(folder, model, encoder.fingerprint, centers, queue)
        encoder.close()
        return site

    @contextmanager
    def worker(self, **settings: str) -> "Iterator[subprocess.Popen[str]]":
        """Yields one more worker, which is ready and has no work."""
        others = len(self.queue.workers())
        command = [
            sys.executable,
            "-m",
            "mlcd",
            "worker",
            "--model",
            self.model,
            "--state",
            str(self.folder),
        ]
        roots = {"MLCD_JOBS__ROOTS": str(self.folder.parent)}
        environment = {**os.environ, **roots, **settings}  # noqa: TID251 - a child's
        process = subprocess.Popen(
            [*command, "--centers", str(self.folder / "centers")], text=True, env=environment
        )
        try:
            while len(self.queue.workers()) == others:
                time.sleep(LOOK_S)
            yield process
        finally:
            process.terminate()
            process.wait()

    def label(self, images: str, name: str) -> Job:
        spec = JobSpec(
            "label",
            images,
            str(self.folder / name),
            fingerprint=self.fingerprint,
            centers=self.centers,
        )
        job, _ = self.queue.submit(spec)
        while (job := self.queue.get(job.id)).ended_s is None:
            time.sleep(LOOK_S)
        if job.state != "succeeded":
            raise SystemExit(f"the job has {job.state}: {job.problem}")
        return job


def seconds(job: Job) -> float:
    assert job.started_s is not None
    assert job.ended_s is not None
    return job.ended_s - job.started_s


def serve_peer(model: str, num: int) -> None:
    """Prints the encoder's images per second as JSON for every line of standard input."""
    encoder = open_encoder(model)
    pictures = photographs(SIZE)
    pixels = np.stack(
        [encoder.preprocess.prepare(pictures[i % len(pictures)]) for i in range(MAX_BATCH)]
    )
    encoder.encode(pixels)
    for _ in sys.stdin:
        started = time.perf_counter()
        for _ in range(num // MAX_BATCH):
            encoder.encode(pixels)
        print(
            json.dumps(num // MAX_BATCH * MAX_BATCH / (time.perf_counter() - started)), flush=True
        )


@contextmanager
def peer(model: str, num: int) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, __file__, "--model", model, "--images", str(num), "--peer"]
    process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(process: "subprocess.Popen[str]") -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(json.loads(process.stdout.readline()))


def measure_rates(folder: Path, model: str, num: int, rounds: int) -> None:
    images = write_shards(folder / "images", num, SIZE)
    site = Site.build(folder / "rates", model)
    ratios = []
    with peer(model, num) as process, site.worker():
        # The first call warms up.
        ask(process)
        site.label(images, "first")
        for number in range(rounds):
            alone = ask(process)
            found = num / seconds(site.label(images, f"labels-{number}"))
            ratios.append(found / alone)
            print(
                f"round {number}: encoder alone {alone:6.1f} images/s, label job {found:6.1f}, "
                f"ratio {ratios[-1]:.3f}"
            )
    print(
        f"ratio: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) "
        f"of {rounds} rounds"
    )
    artifact = open_artifact(site.folder / "labels-0")
    print(
        f"{num} images in {artifact.summary['images']} rows, {artifact.config['engine']}, "
        f"{artifact.summary['scan']}"
    )


def measure_workers(folder: Path, model: str, num: int, rounds: int) -> None:
    images = folder / "images" / "*.tar"
    one, two = (Site.build(folder / name, model) for name in ("one", "two"))
    settings = {"MLCD_ENGINE_THREADS": "1", "MLCD_JOBS__SHARD_IMAGES": str(MAX_BATCH)}
    ratios = []
    with one.worker(**settings), two.worker(**settings), two.worker(**settings):
        for number in range(rounds):
            by_one, by_two = (
                seconds(site.label(str(images), f"labels-{number}")) for site in (one, two)
            )
            ratios.append(by_one / by_two)
            print(
                f"round {number}: {num} images by one worker {by_one:.1f} s, by two {by_two:.1f} s"
            )
    print(
        f"two workers: median {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to "
        f"{max(ratios):.2f})"
    )


@contextmanager
def serving(site: Site) -> Iterator[httpx.Client]:
    """Yields a client of a server without a cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlcd", "serve", "--port", str(port), "--model", site.model]
    command += ["--state", str(site.folder), "--centers", str(site.folder / "centers")]
    settings = {"MLCD_CACHE__MEMORY_BYTES": "0"}
    process = subprocess.Popen(command, env={**os.environ, **settings})  # noqa: TID251 - a child's
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while True:
                with suppress(httpx.TransportError):
                    if client.get("/health/ready").is_success:
                        break
                time.sleep(LOOK_S)
            yield client
    finally:
        process.terminate()
        process.wait()


def write_requests(num: int) -> bytes:
    """Returns the JSONL of a batch, one data-URI a line."""
    uris = [
        "data:image/jpeg;base64," + base64.b64encode(picture).decode()
        for picture in photographs(SIZE)
    ]
    lines = (
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/labels",
            "body": {"images": [uris[number % len(uris)]]},
        }
        for number in range(num)
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def label_batch(client: httpx.Client, num: int, filename: str, content: bytes) -> float:
    """Returns the seconds from the first request of a batch to its end."""
    purpose = "batch" if filename.endswith(".jsonl") else "images"
    files = {"file": (filename, content)}
    file = client.post("/v1/files", files=files, data={"purpose": purpose})
    body = {
        "input_file_id": file.raise_for_status().json()["id"],
        "endpoint": "/v1/labels",
        "completion_window": "24h",
    }
    batch = client.post("/v1/batches", json=body).raise_for_status().json()
    started = None
    while batch["status"] in ("validating", "in_progress", "finalizing"):
        if started is None and batch["status"] != "validating":
            started = time.perf_counter()
        time.sleep(LOOK_S)
        batch = client.get(f"/v1/batches/{batch['id']}").json()
    assert started is not None
    if batch["request_counts"]["completed"] != num:
        raise SystemExit(f"the batch is {batch['status']}: {batch['request_counts']}")
    return time.perf_counter() - started


def measure_batches(folder: Path, model: str, num: int, rounds: int) -> None:
    images = str(folder / "images" / "*.tar")
    site = Site.build(folder / "batches", model)
    (shard,) = (folder / "images").iterdir()
    inputs = {"photos.jsonl": write_requests(num), "photos.tar": shard.read_bytes()}
    ratios = {name: list[float]() for name in inputs}
    with site.worker(), serving(site) as client:
        label_batch(client, MAX_BATCH, "first.jsonl", write_requests(MAX_BATCH))
        site.label(images, "first")
        for number in range(rounds):
            by_job = num / seconds(site.label(images, f"labels-{number}"))
            for name, content in inputs.items():
                by_batch = num / label_batch(client, num, name, content)
                ratios[name].append(by_batch / by_job)
                print(
                    f"round {number}: label job {by_job:6.1f} images/s, batch of {name} "
                    f"{by_batch:6.1f}, ratio {ratios[name][-1]:.3f}"
                )
    for name, of_rounds in ratios.items():
        print(
            f"batch of {name}: median {statistics.median(of_rounds):.3f} of a label job "
            f"({min(of_rounds):.3f} to {max(of_rounds):.3f})"
        )


def measure_memory(folder: Path, sizes: list[int]) -> None:
    site = Site.build(folder / "memory", "pixels")
    for size in sizes:
        images = write_shards(folder / f"images-{size}", size, SMALL)
        with site.worker() as process:
            job = site.label(images, f"labels-{size}")
            status = Path(f"/proc/{process.pid}/status").read_text()
        peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
        print(
            f"{size:6d} images: largest memory {peak:.0f} MiB, {size / seconds(job):.0f} images/s "
            "by pixels"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=[5000, 20000])
    parser.add_argument(
        "--batches", action="store_true", help="measure batches alone, of at most 5,000 images"
    )
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        serve_peer(options.model, options.images)
        return
    with tempfile.TemporaryDirectory() as name:
        if options.batches:
            write_shards(Path(name) / "images", options.images, SIZE)
            measure_batches(Path(name), options.model, options.images, options.rounds)
            return
        measure_rates(Path(name), options.model, options.images, options.rounds)
        measure_workers(Path(name), options.model, options.images, options.rounds)
        measure_memory(Path(name), options.sizes)


if __name__ == "__main__":
    main()
