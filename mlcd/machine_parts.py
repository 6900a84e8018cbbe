"""Tells which optional parts mlcd uses on this machine: the GPU and what runs on it, compiled loops
and a Triton server. For each part that is not used it gives a reason and a remedy.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Final

from mlcd.cores import has_gpu
from mlcd.errors import ConfigInvalid
from mlcd.extras import install_command

_TIMEOUT_S: Final = 3
_NO_GPU: Final = "needs a GPU that torch can use"
_SEE_GPU: Final = "see GPU"


@dataclass(frozen=True)
class PartState:
    """A part that is used or not. detail: what is used, or why it is not."""

    used: bool
    detail: str
    remedy: str | None = None

    def __str__(self) -> str:
        remedy = f" ({self.remedy})" if self.remedy else ""
        return f"{'used' if self.used else 'not used'}: {self.detail}{remedy}"


def examine_parts(triton: str | None = None) -> dict[str, PartState]:
    """Returns the state of each part by its name.

    triton: HOST:PORT of the gRPC of a Triton server to ask; None asks none. Imports torch, FAISS
    and numba where they are installed; a package that cannot be imported is a reason, not an error.
    """
    parts: dict[str, Callable[[], PartState]] = {
        "CUDA of torch": _examine_cuda,
        "GPU": _examine_gpu,
        "GPU kernels": _examine_kernels,
        "search on GPUs": _examine_search,
        "JPEGs on GPUs": _examine_jpegs,
        "compiled loops": _examine_loops,
        "Triton server": lambda: _examine_triton(triton),
    }
    return {name: _examine(examine) for name, examine in parts.items()}


def _examine(examine: Callable[[], PartState]) -> PartState:
    try:
        return examine()
    except (ImportError, OSError) as error:  # OSError: a library that a package loads is missing
        return PartState(False, f"it cannot be loaded: {_first_line(error)}", "install it again")
    except RuntimeError as error:  # the memory of the GPU is full, or its driver fails
        return PartState(False, _first_line(error))


def _examine_cuda() -> PartState:
    if find_spec("torch") is None:
        return PartState(False, "torch is not installed", install_command("train"))
    import torch

    if torch.version.cuda is None:
        remedy = "PyPI's torch for Linux has CUDA; PyTorch's CPU index has not"
        return PartState(False, f"torch {torch.__version__} is built without CUDA", remedy)
    return PartState(True, f"torch {torch.__version__} is built with CUDA {torch.version.cuda}")


def _examine_gpu() -> PartState:
    if not _examine_cuda().used:
        return PartState(False, "needs torch with CUDA", "see CUDA of torch")
    import torch

    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = _first_line(error).partition(". ")[0].rstrip(".")
        remedy = "install or update NVIDIA's driver; in Docker, start with --gpus all"
        return PartState(False, f"{reason}; work is done on the CPU", remedy)
    num = torch.cuda.device_count()
    return PartState(True, f"{num} x {torch.cuda.get_device_name()}")


def _examine_kernels() -> PartState:
    if not _examine_gpu().used:
        return PartState(False, _NO_GPU, _SEE_GPU)
    if find_spec("triton") is None:
        return PartState(False, "the language Triton is not installed", "pip install triton")
    import torch

    from mlcd.clustering.device_products import by_kernels

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if by_kernels(torch.device("cuda")):
            return PartState(True, f"Triton {version('triton')} compiles them")
    reason = "; ".join(_first_line(each.message) for each in caught) or "they do not run"
    remedy = "install gcc and Python's headers; TRITON_CACHE_DIR must allow execution"
    return PartState(False, reason, remedy)


def _examine_search() -> PartState:
    of_faiss = _examine_faiss()
    if not _examine_gpu().used:
        return of_faiss
    scans = "torch scans collections on the GPU, as far as its memory goes"
    return PartState(True, f"{scans}; graphs and cells: {of_faiss.detail}", of_faiss.remedy)


def _examine_faiss() -> PartState:
    if find_spec("faiss") is None:
        return PartState(False, "FAISS is not installed", install_command("serve"))
    import faiss

    if not hasattr(faiss, "StandardGpuResources"):
        remedy = (
            f"pip uninstall faiss-cpu, then {install_command('gpu')}" if has_gpu() else _SEE_GPU
        )
        return PartState(False, f"FAISS {faiss.__version__} is built for CPUs only", remedy)
    if (num := faiss.get_num_gpus()) == 0:
        return PartState(False, f"FAISS {faiss.__version__} finds no GPU", _SEE_GPU)
    from mlcd.indexes.faiss import searches_on_gpus

    if not searches_on_gpus():
        remedy = f"uninstall it, then {install_command('gpu')}"
        return PartState(False, f"FAISS {faiss.__version__} is built without cuVS", remedy)
    return PartState(True, f"FAISS {faiss.__version__} on {num} GPUs")


def _examine_jpegs() -> PartState:
    if not _examine_gpu().used:
        return PartState(False, _NO_GPU, _SEE_GPU)
    from mlcd.images.nvimgcodec import NvDecoder

    try:
        decoder = NvDecoder(0)
    except ConfigInvalid as error:
        return PartState(False, _first_line(error.message), error.remedy)
    return PartState(True, f"nvImageCodec {decoder.version}, by data.decode=device in training")


def _examine_loops() -> PartState:
    if find_spec("numba") is None:
        return PartState(False, "numba is not installed", install_command("compiled"))
    import numba

    return PartState(True, f"numba {numba.__version__}, for scans on the CPU")


def _examine_triton(address: str | None) -> PartState:
    if find_spec("tritonclient") is None:
        return PartState(False, "tritonclient is not installed", install_command("triton"))
    if not address:
        remedy = "set MLCD_TRITON__URL to HOST:PORT of its gRPC"
        return PartState(False, "its address is not set", remedy)
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    try:
        with InferenceServerClient(address) as client:
            is_ready = client.is_server_ready(client_timeout=_TIMEOUT_S)
    except InferenceServerException as error:
        remedy = "start it, or name another address"
        return PartState(False, f"{address} does not answer: {error.message()}", remedy)
    if not is_ready:
        return PartState(False, f"{address} is not ready", "wait until its models are loaded")
    return PartState(True, f"{address} is ready")


def _first_line(error: object) -> str:
    return str(error).partition("\n")[0]
