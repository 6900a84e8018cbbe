"""The arithmetics by which a scan multiplies: those that this machine has."""

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
# Components of all centers, below which numpy multiplies fastest: 1,024 centers of 256 take eight
# bits 0.83 of its time, and 300 of 64 take them 1.5.
_FEW_COMPONENTS: Final = 1 << 18
# Components of a center, with fewer of which too many centers lie within what rounding loses.
_LEAST_COMPONENTS: Final = 64


def fastest_matmuls(centers: Embeddings, *, import_torch: bool | None = None) -> list[MatmulName]:
    """Returns the arithmetics that are at hand, the fastest first; the last one is numpy's.

    import_torch: whether torch is imported for them, where it is installed; None: for many
    centers. For few that takes longer than it gains, unless a scan goes on for long.
    """
    names: list[MatmulName] = ["numpy"]
    if import_torch is None:
        import_torch = len(centers) >= BLOCK_CENTERS
    at_hand = find_spec("torch") is not None and (import_torch or "torch" in sys.modules)
    are_short = centers.shape[1] < _LEAST_COMPONENTS or centers.size < _FEW_COMPONENTS
    if are_short or not at_hand:
        return names
    from mlcd.clustering.device_scan import cuda_available
    from mlcd.clustering.int8_matmul import MOST_COMPONENTS, computes_int8

    if centers.shape[1] <= MOST_COMPONENTS and computes_int8():
        names.insert(0, "torch-int8")
    if cuda_available():
        names.insert(0, DEVICE)
    return names


def open_matmul(name: MatmulName, centers: Embeddings, block: int = BLOCK_CENTERS) -> Matmul:
    """Opens the named arithmetic of the CPU over these centers, for products with blocks of so many
    of them.

    Raises ConfigInvalid where torch is not installed, or the arithmetic is too narrow for so many
    components.
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
            f"{name} multiplies {MOST_COMPONENTS} components at most, not {centers.shape[1]}",
            remedy="use auto or numpy",
        )
    return Int8Matmul(centers, block)


def open_device(centers: Embeddings) -> Shortlister:
    """Puts these centers on the GPU.

    Raises ConfigInvalid where torch is not installed or finds no GPU, and Unavailable where they do
    not fit.
    """
    try:
        from mlcd.clustering.device_scan import cuda_available, on_gpu
    except ImportError as error:
        raise ConfigInvalid(f"{DEVICE} needs torch", remedy=install_command("train")) from error
    if not cuda_available():
        raise ConfigInvalid(f"{DEVICE} needs a GPU", remedy="use auto or numpy")
    return on_gpu(centers)
