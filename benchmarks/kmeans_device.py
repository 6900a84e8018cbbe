"""k-means whose rows stay on a GPU: rows a second, and the share of the time that each part takes.

    python benchmarks/kmeans_device.py [--rows 200000] [--clusters 16384] [--dimension 768]
                                       [--iterations 6] [--room BYTES] [--device cuda]

The rows are those of benchmarks/kmeans.py. The first run is timed as a whole, with the first
centers. The second waits for the device around each part, so its total is larger. The parts are the
copies of blocks, products (with the opening of a scan), and sums; the host has the rest. --room:
the bytes of rows that stay on the device (0: every pass reads and copies all). --device cpu tests
this program; its figures mean nothing.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from kmeans import make_rows

from mlcd.clustering import device_members
from mlcd.clustering import kmeans as trainer
from mlcd.clustering.device_members import DeviceMembers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--clusters", type=int, default=16_384)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--room", type=int)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.set_defaults(embeddings=None, flat=False)
    options = parser.parse_args()
    rows = make_rows(options)
    trainer._DEVICE, trainer._ROWS_ON_DEVICE = options.device, options.room  # noqa: SLF001
    trainer.fastest_matmuls = lambda *_, **__: [trainer.DEVICE]
    trainer._MANY_CENTERS = 1  # noqa: SLF001
    run = lambda num: trainer.kmeans(  # noqa: E731
        [rows], options.clusters, iterations=num, tolerance=0.0
    )
    run(0)  # compiles kernels
    began = time.perf_counter()
    objective = run(options.iterations).objective[-1]
    seconds = time.perf_counter() - began
    parts = measure_parts(lambda: run(options.iterations), options.device)
    total = parts.pop("total")
    shares = ", ".join(f"{name} {part / total:.1%}" for name, part in parts.items())
    print(f"{total:.2f} s with waits: {shares}, host {1 - sum(parts.values()) / total:.1%}")
    print(
        f"{seconds:.2f} s, {len(rows) * options.iterations / seconds:,.0f} rows/s, "
        f"objective {objective:.6f}, on {options.device}"
    )


def measure_parts(work: Callable[[], object], device: str) -> dict[str, float]:
    """Returns the seconds of each part, and of all."""
    parts = {"copy": 0.0, "products": 0.0, "sums": 0.0}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measure(*arguments: Any) -> Any:
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            result = call(*arguments)
            if device == "cuda":
                torch.cuda.synchronize()
            parts[name] += time.perf_counter() - began
            return result

        return measure

    DeviceMembers._copy = timed("copy", DeviceMembers._copy)  # type: ignore[method-assign] # noqa: SLF001
    DeviceMembers._nearest = timed("products", DeviceMembers._nearest)  # type: ignore[method-assign] # noqa: SLF001
    DeviceMembers._move = timed("sums", DeviceMembers._move)  # type: ignore[method-assign] # noqa: SLF001
    device_members.on_gpu = timed("products", device_members.on_gpu)  # type: ignore[assignment]
    began = time.perf_counter()
    work()
    return parts | {"total": time.perf_counter() - began}


if __name__ == "__main__":
    main()
