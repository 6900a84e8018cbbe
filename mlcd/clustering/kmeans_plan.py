"""Estimates the memory, arithmetic and time of a clustering before it starts."""

import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

import numpy as np

from mlcd.clustering.nearest import CenterScan
from mlcd.clustering.row_threads import allowed_threads
from mlcd.clustering.rows import BLOCK_ROWS, kept_bytes
from mlcd.types import unit_rows

_TILE_ROWS: Final = 1024
_TILE_CENTERS: Final = 8192
_RUNS: Final = 3
CENTER_BYTES: Final = 4  # id of a row's center
# Bytes per component of the centers: 8 for the present and the next centers in float32, 9 for their
# eight-bit form and heads, with temporaries.
_COMPONENT_BYTES: Final = 8 + 9
# Measured: Python with numpy, torch and numba; products, per thread.
_LIBRARY_BYTES: Final = 320 * 2**20
_THREAD_BYTES: Final = 64 * 2**20
# Rows per cluster whose distances are measured at the end, and sorted by cluster.
MEASURED_EACH: Final = 256
_MEASURED_BYTES: Final = 56


@dataclass(frozen=True)
class Plan:
    """The cost of a clustering.

    memory_bytes: memory per process. library_bytes: its part for Python, libraries and threads.
    flops: operations of all passes. seconds: time at the measured rate.
    """

    num_rows: int
    num_clusters: int
    dimension: int
    passes: int
    processes: int
    memory_bytes: int
    library_bytes: int
    flops: float
    flops_per_s: float

    @property
    def seconds(self) -> float:
        return self.flops / self.flops_per_s / self.processes

    def facts(self) -> dict[str, float]:
        """Returns the fields of the plan as a dictionary, for machine-readable output."""
        return asdict(self) | {"seconds": self.seconds, "bytes_read_per_pass": self.rows_bytes}

    def __str__(self) -> str:
        shared = f" in each of {self.processes} processes" if self.processes > 1 else ""
        return (
            f"{self.num_rows} rows of {self.dimension} into {self.num_clusters} clusters: "
            f"at most {self.passes} passes\n"
            f"memory      {self.memory_bytes / 2**30:.2f} GiB{shared}\n"
            f"reading     {self.rows_bytes / 2**30:.2f} GiB a pass\n"
            f"arithmetic  {self.flops:.3g} floating-point operations\n"
            f"time        {timedelta(seconds=round(self.seconds))} "
            f"at the {self.flops_per_s / 1e9:.0f} GFLOP/s measured here; "
            "less where rows settle early, more for the first centers"
        )

    @property
    def rows_bytes(self) -> int:
        """Returns the bytes that one pass reads, as float32."""
        return self.num_rows * self.dimension * 4


def plan(
    num_rows: int,
    num_clusters: int,
    dimension: int,
    *,
    iterations: int,
    processes: int = 1,
    flops_per_s: float | None = None,
    row_bytes: int = CENTER_BYTES,
) -> Plan:
    """Computes the memory, the arithmetic and the time of at most `iterations` updates.

    row_bytes: memory per row; for k-means, the id of its center. flops_per_s: rate per process;
    None measures a tile on this machine.
    """
    matrix = num_clusters * dimension
    centers, sums = _COMPONENT_BYTES * matrix, 8 * matrix * (1 if processes == 1 else 3)
    # A block as read, its rows sorted by cluster, and their float64 form.
    block = BLOCK_ROWS * dimension * 4 * 3
    libraries = _LIBRARY_BYTES + _THREAD_BYTES * allowed_threads()
    own_rows = -(-num_rows // processes)
    rows = own_rows * row_bytes + kept_bytes(own_rows, dimension)
    measured = _MEASURED_BYTES * min(num_rows, MEASURED_EACH * num_clusters)
    passes = iterations + 1
    return Plan(
        num_rows=num_rows,
        num_clusters=num_clusters,
        dimension=dimension,
        passes=passes,
        processes=processes,
        memory_bytes=libraries + max(centers + sums, 4 * matrix + measured) + block + rows,
        library_bytes=libraries,
        flops=2.0 * num_rows * num_clusters * dimension * passes,
        flops_per_s=flops_per_s or measured_rate(num_clusters, dimension),
    )


def measured_rate(num_clusters: int, dimension: int) -> float:
    """Returns the floating-point operations a second of a scan of centers on this machine."""
    num_centers = min(num_clusters, _TILE_CENTERS)
    generator = np.random.default_rng(0)
    centers = unit_rows(generator.standard_normal((num_centers, dimension), dtype=np.float32))
    rows = unit_rows(generator.standard_normal((_TILE_ROWS, dimension), dtype=np.float32))
    scan = CenterScan(centers)
    scan.nearest(rows, 1)
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        scan.nearest(rows, 1)
        times.append(time.perf_counter() - began)
    return 2.0 * _TILE_ROWS * num_centers * dimension / min(times)
