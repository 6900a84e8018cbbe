"""The arithmetics by which a scan multiplies: those that there are, and which is fastest here."""

import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final, Literal

import numpy as np

from mlcd.clustering.matmul import Matmul, NumpyMatmul
from mlcd.clustering.row_threads import on_one_core
from mlcd.clustering.shortlist import Shortlister
from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command
from mlcd.types import Embeddings

MatmulName = Literal["numpy", "torch-fp32", "torch-bf16", "torch-int8", "cuda-bf16"]
# the arithmetics that round their inputs
ROUNDED_MATMULS: Final = ("torch-bf16", "torch-int8", "cuda-bf16")
DEVICE: Final = "cuda-bf16"
BLOCK_CENTERS: Final = 4096
TIMED_RUNS: Final = 2
TIMED_ROWS: Final = 256


def fastest_matmuls(centers: Embeddings, *, import_torch: bool | None = None) -> list[MatmulName]:
    """Returns the arithmetics that are at hand: a GPU's, then those of the CPU, by the time in
    which one core multiplies one tile of these centers.

    import_torch: whether torch is imported for them, where it is installed; None: for many
    centers. For few that takes longer than it gains, unless a scan goes on for long.
    """
    names: list[MatmulName] = ["numpy"]
    device: list[MatmulName] = []
    if import_torch is None:
        import_torch = len(centers) >= BLOCK_CENTERS
    if find_spec("torch") is not None and (import_torch or "torch" in sys.modules):
        from mlcd.clustering.int8_matmul import MOST_COMPONENTS, computes_int8
        from mlcd.clustering.torch_matmul import cuda_available

        names += ["torch-fp32", "torch-bf16"]
        eight_bits = centers.shape[1] <= MOST_COMPONENTS and computes_int8()
        names += ["torch-int8"] if eight_bits else []
        device = [DEVICE] if cuda_available() else []
    tile = centers[:BLOCK_CENTERS]
    seconds = on_one_core(lambda: {name: _seconds(open_matmul(name, tile), tile) for name in names})
    return [*device, *sorted(names, key=seconds.__getitem__)]


def open_matmul(name: MatmulName, centers: Embeddings, block: int = BLOCK_CENTERS) -> Matmul:
    """Opens the named arithmetic of the CPU over these centers, for products with blocks of so many
    of them.

    Raises ConfigInvalid where torch is not installed, or the arithmetic has no room for so many
    components.
    """
    if name == "numpy":
        return NumpyMatmul(centers)
    try:
        from mlcd.clustering.int8_matmul import MOST_COMPONENTS, Int8Matmul
        from mlcd.clustering.torch_matmul import TorchMatmul
    except ImportError as error:
        raise ConfigInvalid(
            f"{name} needs torch", remedy=f"{install_command('train')}, or use numpy"
        ) from error
    if name == "torch-int8":
        if centers.shape[1] > MOST_COMPONENTS:
            raise ConfigInvalid(
                f"{name} multiplies {MOST_COMPONENTS} components at most, not {centers.shape[1]}",
                remedy="use auto or numpy",
            )
        return Int8Matmul(centers, block)
    return TorchMatmul(centers, bf16=name in ROUNDED_MATMULS)


def open_device(centers: Embeddings) -> Shortlister:
    """Puts these centers on the GPU.

    Raises ConfigInvalid where torch is not installed or finds no GPU, and Unavailable where they do
    not fit.
    """
    try:
        from mlcd.clustering.device_scan import on_gpu
        from mlcd.clustering.torch_matmul import cuda_available
    except ImportError as error:
        raise ConfigInvalid(f"{DEVICE} needs torch", remedy=install_command("train")) from error
    if not cuda_available():
        raise ConfigInvalid(f"{DEVICE} needs a GPU", remedy="use auto or numpy")
    return on_gpu(centers)


def clock_for(names: Sequence[MatmulName]) -> Callable[[], float]:
    """Returns the clock by which these are compared: the time of the calling thread, as others may
    share the CPU, and that of the wall where a GPU takes part.
    """
    return time.perf_counter if DEVICE in names else time.thread_time


def _seconds(matmul: Matmul, tile: Embeddings) -> float:
    rows = matmul.load(np.ascontiguousarray(tile[:TIMED_ROWS])).data
    threshold = np.full(min(len(tile), TIMED_ROWS), 2.0, dtype=np.float32)
    times = []
    for _ in range(TIMED_RUNS + 1):  # the first warms up
        started = time.thread_time()
        matmul.above(matmul.multiply(rows, 0, len(tile)), threshold)
        times.append(time.thread_time() - started)
    return min(times)
