"""The cost of reading through Ray Data: the same images into the processes of a model on Ray.

    python -m benchmarks.ray_reading ../shared/data/fashion_products/images

Started by `-m`, because beside it there is a file with the name of the package. Copies at most
`--images` files of the folder and reads them in turns, `--rounds` times each way, on a node of two
CPUs and one GPU that Ray only counts. `workers`: two actors with half the GPU each read and decode
parts of 200 images themselves, as the workers of `--on ray` do. `ray data`: two CPUs read and
decode blocks of 200, and an actor with the GPU gets batches of them. No model runs. Prints the CPU
seconds of all processes, Ray's own with them, and the ratio of the least of each.
"""

import logging
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import click
import numpy as np
from numpy.typing import NDArray

from mlcd.images.prefetch import prepare_all
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec

_PART, _BATCH, _SIDE = 200, 32, 224
_STORE_BYTES = 512 << 20
_SAMPLE_S = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


@click.command()
@click.argument("images", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--images", "num", default=2000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(images: Path, num: int, rounds: int) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # noqa: TID251
    import ray
    import ray.data

    ways = {"workers": by_workers, "ray data": by_ray_data}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(sorted(images.rglob("*.jpg"))[:num]):
            shutil.copyfile(path, Path(folder) / f"{number:06d}.jpg")
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
        options |= {"_node_ip_address": "127.0.0.1", "logging_level": "ERROR"}
        ray.init("local", num_cpus=2, num_gpus=1, object_store_memory=_STORE_BYTES, **options)
        for number in range(rounds + 1):  # the first starts processes, and does not count
            for way, read in ways.items():
                began, meter = time.perf_counter(), CpuSeconds()
                with meter:
                    found = read(ray, folder)
                assert found == num, (way, found)
                if number:
                    seconds[way].append(meter.total)
                    wall = time.perf_counter() - began
                    print(f"{way}: {meter.total:.1f} CPU seconds in {wall:.1f} s", flush=True)
        ray.shutdown()
    ratio = min(seconds["ray data"]) / min(seconds["workers"])
    print(f"ray data / workers {ratio:.2f}")


def by_workers(ray: Any, folder: str) -> int:
    """Returns how many images the two workers have read: each has one part at a time."""
    num = len(open_source(folder).entries)
    parts = [slice(start, start + _PART) for start in range(0, num, _PART)]
    readers = [ray.remote(num_cpus=1, num_gpus=0.5)(Reader).remote(folder) for _ in range(2)]
    busy = {reader.read.remote(parts.pop()): reader for reader in readers}
    found = 0
    while busy:
        (done,), _ = ray.wait(list(busy), num_returns=1)
        reader = busy.pop(done)
        found += ray.get(done)
        if parts:
            busy[reader.read.remote(parts.pop())] = reader
    return found


class Reader:
    """A worker that reads for itself."""

    def __init__(self, folder: str) -> None:
        self._source = open_source(folder)

    def read(self, part: slice) -> int:
        entries, spec = self._source.entries[part], PreprocessSpec(_SIDE, _SIDE)
        images = [
            each.pixels
            for each in prepare_all(self._source, entries, spec, num_threads=1)
            if each.pixels is not None
        ]
        batches = [np.stack(images[at : at + _BATCH]) for at in range(0, len(images), _BATCH)]
        return sum(map(len, batches))


def by_ray_data(ray: Any, folder: str) -> int:
    """Returns how many images Ray Data has brought to the process of the model."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    num_blocks = -(-len(list(Path(folder).iterdir())) // _PART)
    images = ray.data.read_images(
        folder, mode="RGB", size=(_SIDE, _SIDE), override_num_blocks=num_blocks
    )
    counted = images.map_batches(
        Batches,
        batch_size=_BATCH,
        num_cpus=0,
        num_gpus=1,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    return sum(int(batch["num"].sum()) for batch in counted.iter_batches())


class Batches:
    """The process of the model, which takes batches."""

    def __call__(self, batch: dict[str, NDArray[np.uint8]]) -> dict[str, NDArray[np.int64]]:
        return {"num": np.array([len(batch["image"])])}


class CpuSeconds:
    """Adds up the CPU time of this process and of all that descend from it, within the block."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._first = cpu_seconds()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def total(self) -> float:
        return sum(each - self._first.get(pid, 0.0) for pid, each in self._last.items())

    def _sample(self) -> None:
        over = False
        while not over:  # a process that has ended counts with what it was last seen with
            over = self._over.wait(_SAMPLE_S)
            self._last |= cpu_seconds()


def cpu_seconds() -> dict[int, float]:
    """Returns the CPU time of this process and of each that descends from it."""
    seconds, children = {}, defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            children[int(fields[1])].append(pid)
            seconds[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    found, waiting = {}, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        found[pid] = seconds.get(pid, 0.0)
        waiting += children[pid]
    return found


if __name__ == "__main__":
    main()
