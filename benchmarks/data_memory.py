"""Memory of the keys and labels of a training set, in each process of a machine.

    python benchmarks/data_memory.py [--samples 10000000] [--processes 2] [--labels 8]

Writes parquet shards of images of one byte and a table of random labels, opens them as `mlcd train`
does, reads every label, digest and key once, and prints the bytes an image that each process has of
its own (Private_* of /proc/self/smaps_rollup, after less before), the peak of the process that
joins, and the seconds until all are open. It needs some 300 bytes of disk an image.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.labels import write_part
from mlcd.artifacts.manifest import Request
from mlcd.types import Neighbors
from training.config import load_config
from training.data.maps import open_shared_dataset
from training.parallel.processes import open_processes

_SHARD = 100_000
_CENTERS = 1_000_000


def write_set(folder: Path, num: int, top: int) -> None:
    """Writes images of no bytes, and labels of them."""
    (folder / "images").mkdir()
    generator = np.random.default_rng(0)
    request = Request("labels", {"num_centers": _CENTERS, "top": top})
    with Draft(folder / "labels", request) as draft:
        for part, start in enumerate(range(0, num, _SHARD)):
            rows = min(_SHARD, num - start)
            keys = [f"{part:06d}/{row:09d}" for row in range(rows)]
            images = pa.array([b"x"] * rows, pa.binary())
            table = pa.table({"key": keys, "image": images})
            pq.write_table(table, folder / f"images/{part:06d}.parquet")
            ids = generator.integers(0, _CENTERS, (rows, top), dtype=np.int32)
            digests = [generator.bytes(32) for _ in range(rows)]
            write_part(draft, part, keys, digests, Neighbors(ids, np.ones(ids.shape, np.float32)))
        draft.publish()


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private"))


def measure(folder: Path) -> None:
    """Writes the figures of one process into the folder."""
    places = [f"data.images={folder}/images/*.parquet", f"data.labels={folder}/labels"]
    config = load_config("smoke", [*places, "out=unused"])
    with open_processes("cpu", 1) as processes:
        before, began = private_bytes(), time.perf_counter()
        dataset = open_shared_dataset(config, processes)
        processes.meet("the data")
        seconds = time.perf_counter() - began
        (part,) = dataset.parts
        part.labels.sum(), part.sha256.sum(), sum(map(len, part.entries.keys()))
        gc.collect()
        processes.meet("the end of reading")  # a page that one alone has read counts as its own
        own = private_bytes() - before
        processes.meet("the end")
        peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        figures = {"samples": len(dataset), "own": own, "peak": peak, "seconds": seconds}
        (folder / f"{processes.world.rank}.figures").write_text(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--labels", type=int, default=8)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        measure(options.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        write_set(Path(name), options.samples, options.labels)
        # The listings of shards that are gone afterwards are to go with them.
        together = ["env", f"XDG_CACHE_HOME={name}", sys.executable, "-m", "torch.distributed.run"]
        together += ["--standalone", "--nproc-per-node", str(options.processes)]
        command = [*together, __file__, "--folder", name]
        subprocess.run(command, check=True)
        figures = [json.loads(path.read_text()) for path in sorted(Path(name).glob("*.figures"))]
    seconds, peak = (max(each[name] for each in figures) for name in ("seconds", "peak"))
    own = [each["own"] / options.samples for each in figures]
    print(f"{figures[0]['samples']:,} of {options.samples:,} samples, open after {seconds:.0f} s")
    print(f"bytes an image, of each process's own: {', '.join(f'{each:.1f}' for each in own)}")
    print(f"of all of them: {sum(own):.1f}")
    print(f"of the process that joins, at its peak: {peak / options.samples:.0f}")


if __name__ == "__main__":
    main()
