"""The arithmetics by which a scan multiplies: those that there are, and which is fastest here."""

import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final, Literal

import numpy as np

from mlcd.clustering.matmul import Matmul, NumpyMatmul
from mlcd.errors import ConfigInvalid
from mlcd.types import Embeddings

MatmulName = Literal["numpy", "torch-fp32", "torch-bf16", "torch-int8", "cuda-bf16"]
# the arithmetics that round their inputs
ROUNDED_MATMULS: Final = ("torch-bf16", "torch-int8", "cuda-bf16")
BLOCK_CENTERS: Final = 4096
TIMED_RUNS: Final = 2
TIMED_ROWS: Final = 256


def fastest_matmuls(centers: Embeddings) -> list[MatmulName]:
    """Returns the arithmetics that are at hand, those that multiply one tile of these centers
    fastest here first.
    """
    names: list[MatmulName] = ["numpy"]
    # for few centers torch is not imported: that would take longer than it gains
    few = len(centers) < BLOCK_CENTERS and "torch" not in sys.modules
    if find_spec("torch") is not None and not few:
        from mlcd.clustering.int8_matmul import computes_int8
        from mlcd.clustering.torch_matmul import cuda_available

        names += ["torch-fp32", "torch-bf16"]
        names += ["torch-int8"] if computes_int8() else []
        names += ["cuda-bf16"] if cuda_available() else []
    tile, clock = centers[:BLOCK_CENTERS], clock_for(names)
    return sorted(names, key=lambda name: _seconds(open_matmul(name, tile), tile, clock))


def open_matmul(name: MatmulName, centers: Embeddings, block: int = BLOCK_CENTERS) -> Matmul:
    """Opens the named arithmetic over these centers, for products with blocks of so many of them.

    Raises ConfigInvalid where torch is not installed or there is no GPU.
    """
    if name == "numpy":
        return NumpyMatmul(centers)
    try:
        from mlcd.clustering.int8_matmul import Int8Matmul
        from mlcd.clustering.torch_matmul import TorchMatmul
    except ImportError as error:
        raise ConfigInvalid(
            f"{name} needs torch", remedy="pip install 'mlcd[train]', or use numpy"
        ) from error
    if name == "torch-int8":
        return Int8Matmul(centers, block)
    return TorchMatmul(
        centers, bf16=name in ROUNDED_MATMULS, device="cuda" if name == "cuda-bf16" else "cpu"
    )


def clock_for(names: Sequence[MatmulName]) -> Callable[[], float]:
    """Returns the clock by which these are compared: the time of the CPU, as others may share it,
    and that of the wall where a GPU takes part.
    """
    return time.perf_counter if "cuda-bf16" in names else time.process_time


def _seconds(matmul: Matmul, tile: Embeddings, clock: Callable[[], float]) -> float:
    rows = matmul.load(np.ascontiguousarray(tile[:TIMED_ROWS])).data
    threshold = np.full(min(len(tile), TIMED_ROWS), 2.0, dtype=np.float32)
    times = []
    for _ in range(TIMED_RUNS + 1):  # the first warms up
        started = clock()
        matmul.above(matmul.multiply(rows, 0, len(tile)), threshold)
        times.append(clock() - started)
    return min(times)
