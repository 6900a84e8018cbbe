"""The peak memory of `mlcd cluster`, flat and with coarser levels, over the same synthetic rows.

    python benchmarks/levels_memory.py --rows 1000000 --dimension 128 --levels 2000,200,20

Each runs in a process of its own, whose /proc says its peak. Few iterations are enough: every
iteration takes the same memory.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlcd.artifacts.draft import Draft
from mlcd.artifacts.embeddings import KEY_SCHEMA, keys_name, part_name
from mlcd.artifacts.manifest import Request
from mlcd.keys import split_positions
from mlcd.types import unit_rows

_PART_ROWS: Final = 100_000
_MEASURED: Final = """
import re, sys
from pathlib import Path
from mlcd.cli import main
try:
    main()
finally:
    status = Path("/proc/self/status").read_text()
    print("peak", re.search(r"VmHWM:\\s*(\\d+)", status)[1], flush=True)
"""


@click.command()
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--dimension", default=128, show_default=True)
@click.option("--levels", default="2000,200,20", show_default=True)
@click.option("--iterations", default=2, show_default=True)
def main(rows: int, dimension: int, levels: str, iterations: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_rows(place / "embeddings", rows, dimension)
        finest = levels.partition(",")[0]
        common = ("--iterations", str(iterations), "--hold-out", "0")
        flat = peak_mib(place, "flat", "--clusters", finest, *common)
        leveled = peak_mib(place, "leveled", "--levels", levels, *common)
    print(f"{rows} rows of {dimension}: {finest} clusters {flat:.0f} MiB,", end=" ")
    print(f"levels {levels} {leveled:.0f} MiB, ratio {leveled / flat:.3f}")


def write_rows(out: Path, num: int, dimension: int) -> None:
    """Writes an embeddings artifact of rows around 5,000 random directions."""
    generator = np.random.default_rng(0)
    means = generator.standard_normal((5000, dimension), dtype=np.float32)
    with Draft(out, Request("embeddings", fingerprint="f" * 64)) as draft:
        for part, start in enumerate(range(0, num, _PART_ROWS)):
            size = min(_PART_ROWS, num - start)
            noise = generator.standard_normal((size, dimension), dtype=np.float32)
            with draft.write(part_name(part)) as path, path.open("wb") as file:
                np.save(file, unit_rows(means[generator.integers(0, 5000, size)] + noise))
            keys = [f"{number:08d}" for number in range(start, start + size)]
            classes = [None] * size
            table = {
                "key": keys,
                "class_name": classes,
                "sha256": [number.to_bytes(32, "big") for number in range(start, start + size)],
                "split": split_positions(keys, classes),
            }
            with draft.write(keys_name(part)) as path:
                pq.write_table(pa.table(table, schema=KEY_SCHEMA), path)
        draft.publish()


def peak_mib(place: Path, name: str, *options: str) -> float:
    command = [sys.executable, "-c", _MEASURED, "cluster", "embeddings", name, *options]
    done = subprocess.run(command, cwd=place, check=False, capture_output=True, text=True)
    found = re.search(r"^peak (\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise SystemExit(done.stderr)
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
