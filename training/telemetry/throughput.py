"""The speed of a run and its limits: images, arithmetic, waiting for data, memory."""

import time
from pathlib import Path
from typing import Final, Literal

import torch

Precision = Literal["fp32", "bf16", "fp64"]

_DTYPES: Final[dict[Precision, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
_FIRST_SIZE: Final = 256
# Smaller products say little where other programs share the device.
_SURE_SIZE: Final = 1024
_SURE_S: Final = 2.0  # a CPU without bfloat16 takes longer for that size, and keeps to a smaller
_LAST_SIZE: Final = 8192  # the size at which an H200 reaches its limit
_MEASURING_S: Final = 0.3
_RUNS: Final = 3
# These are taken whatever time they need, because the first ones may fall into a stall.
_LEAST_TRIES: Final = 6


class Throughput:
    """The rates of this process over a window.

    `read` ends a window; the first one begins when the object is made. flops_per_image:
    `mlcd.training.flops.step_flops`. peak_tflops: the matrix limit of this process's device.
    """

    def __init__(self, flops_per_image: float, peak_tflops: float, device: torch.device) -> None:
        self._flops_per_image, self._peak_tflops, self._device = (
            flops_per_image,
            peak_tflops,
            device,
        )
        self._open_window()

    def add(self, num_images: int, wait_s: float) -> None:
        """Records a step with `num_images` of this process, after a wait of `wait_s` seconds for
        them.
        """
        self._images += num_images
        self._wait_s += wait_s

    def read(self) -> dict[str, float]:
        """Returns the rates, and begins a new window.

        They are images_per_s, tflops, mfu (0 to 1), data_wait (share of the time) and
        peak_memory_gib. tflops and mfu count what a step computes, recomputation included. Memory
        is the peak since the process began: of tensors on a GPU, of the whole process on the CPU.
        Call it once the device has finished, as after a value has been fetched from it: on a GPU,
        work in progress counts as done.
        """
        seconds = time.perf_counter() - self._began
        images_per_s = self._images / seconds
        tflops = images_per_s * self._flops_per_image / 1e12
        rates = {
            "images_per_s": images_per_s,
            "tflops": tflops,
            "mfu": tflops / self._peak_tflops,
            "data_wait": self._wait_s / seconds,
            "peak_memory_gib": peak_memory_bytes(self._device) / 2**30,
        }
        self._open_window()
        return rates

    def _open_window(self) -> None:
        self._began, self._images, self._wait_s = time.perf_counter(), 0, 0.0


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak since the process began: of tensors on a GPU, of the whole process on the
    CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def measure_peak_tflops(device: torch.device, precision: Precision) -> float:
    """Measures the best rate of several short runs of square matrix products.

    Their sides double as long as there is time. It takes about 0.3 s beyond loading the libraries,
    longer on a machine that is busy or slow, and seconds in a precision that it emulates.
    """
    best, size, tries = 0.0, _FIRST_SIZE, 0
    # The first product loads libraries, which is not a part of the time.
    _product_seconds(size, device, _DTYPES[precision])
    deadline = time.perf_counter() + _MEASURING_S
    while tries < _LEAST_TRIES or time.perf_counter() < deadline:
        seconds = _product_seconds(size, device, _DTYPES[precision])
        best, tries = max(best, 2.0 * size**3 / seconds / 1e12), tries + 1
        larger_s = 8 * (_RUNS + 1) * seconds
        allowed_s = _SURE_S if size < _SURE_SIZE else deadline - time.perf_counter()
        if size < _LAST_SIZE and larger_s < allowed_s:
            size *= 2
    return best


def _product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(size)
    # The numbers are random, because a GPU multiplies zeros faster than anything else.
    matrix = torch.randn((size, size), generator=generator, device=device).to(dtype)
    times = []
    for run in range(_RUNS + 1):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        # The first run loads what this size needs.
        if run:
            times.append(time.perf_counter() - began)
    return min(times)
