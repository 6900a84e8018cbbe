"""Selects among the arithmetics that a scan can multiply with on this machine."""

import sys
from importlib.util import find_spec
from typing import Final, Literal

from mlcd.clustering.matmul import Matmul, NumpyMatmul
from mlcd.clustering.shortlist import Shortlister
from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command
from mlcd.types import Embeddings

MatmulName = Literal["numpy", "torch-int8", "cuda-bf16"]
DEVICE: Final = "cuda-bf16"
BLOCK_CENTERS: Final = 4096
# Total components of all centers, below which numpy is fastest. Eight bits take 0.83 of numpy's
# time for 1,024 centers of dimension 256, and 1.5 of it for 300 centers of dimension 64.
_FEW_COMPONENTS: Final = 1 << 18
# Lowest dimension of centers: below it, too many centers lie within the rounding error.
_LEAST_COMPONENTS: Final = 64


def fastest_matmuls(centers: Embeddings, *, import_torch: bool | None = None) -> list[MatmulName]:
    """Returns the available arithmetics, fastest first; the last is numpy's.

    import_torch: whether to import torch if it is installed; None imports it only for many centers.
    For few centers the import takes longer than it saves, unless the scan is long.
    """
    names: list[MatmulName] = ["numpy"]
    if import_torch is None:
        import_torch = len(centers) >= BLOCK_CENTERS
    is_available = find_spec("torch") is not None and (import_torch or "torch" in sys.modules)
    are_small = centers.shape[1] < _LEAST_COMPONENTS or centers.size < _FEW_COMPONENTS
    if are_small or not is_available:
        return names
    from mlcd.clustering.device_scan import cuda_available
    from mlcd.clustering.int8_matmul import MOST_COMPONENTS, computes_int8

    if centers.shape[1] <= MOST_COMPONENTS and computes_int8():
        names.insert(0, "torch-int8")
    if cuda_available():
        names.insert(0, DEVICE)
    return names


def open_matmul(name: MatmulName, centers: Embeddings, block: int = BLOCK_CENTERS) -> Matmul:
    """Opens the named arithmetic of the CPU over these centers.

    block: number of centers per product. Raises ConfigInvalid if torch is not installed, or if the
    dimension exceeds the maximum of the arithmetic.
    """
    if name == "numpy":
        return NumpyMatmul(centers)
    try:
        from mlcd.clustering.int8_matmul import MOST_COMPONENTS, Int8Matmul
    except ImportError as error:
        raise ConfigInvalid(
            f"{name} needs torch", remedy=f"{install_command('train')}, or use numpy"
        ) from error
    if centers.shape[1] > MOST_COMPONENTS:
        raise ConfigInvalid(
            f"{name} requires at most {MOST_COMPONENTS} components, got {centers.shape[1]}",
            remedy="use auto or numpy",
        )
    return Int8Matmul(centers, block)


def open_device(centers: Embeddings) -> Shortlister:
    """Puts these centers on the GPU.

    Raises ConfigInvalid if torch is not installed or finds no GPU, and Unavailable if the centers
    do not fit.
    """
    try:
        from mlcd.clustering.device_scan import cuda_available, on_gpu
    except ImportError as error:
        raise ConfigInvalid(f"{DEVICE} needs torch", remedy=install_command("train")) from error
    if not cuda_available():
        raise ConfigInvalid(f"{DEVICE} needs a GPU", remedy="use auto or numpy")
    return on_gpu(centers)
