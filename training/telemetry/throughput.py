"""Rates of a run: images and FLOPs per second, share of time waiting for data, peak memory."""

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
# Smaller products are too noisy on a shared device, so up to this size the limit of one step is
# _RELIABLE_S, whatever the time limit. A CPU without bfloat16 needs more and keeps a smaller size.
_RELIABLE_SIZE: Final = 1024
_RELIABLE_S: Final = 2.0
_LAST_SIZE: Final = 8192  # the size at which an H200 reaches its peak
_MEASURING_S: Final = 0.3
_RUNS: Final = 3
# These run regardless of the time limit, because the first ones may be slowed by a stall.
_MIN_TRIES: Final = 6


class Throughput:
    """The rates of this process over a window.

    The first window starts at construction; `read` ends a window and starts the next.
    flops_per_image: from `mlcd.training.flops.step_flops`. peak_tflops: peak matrix throughput of
    this process's device.
    """

    def __init__(self, flops_per_image: float, peak_tflops: float, device: torch.device) -> None:
        self._flops_per_image, self._peak_tflops, self._device = (
            flops_per_image,
            peak_tflops,
            device,
        )
        self._on_cpu: int | None = None
        self._open_window()

    def add(self, num_images: int, wait_s: float, num_on_cpu: int | None = None) -> None:
        """Adds a step: this process's number of images, and the seconds that it waited for them.

        num_on_cpu: number of images that the device left to the CPU; None if the CPU decodes all.
        """
        self._images += num_images
        self._wait_s += wait_s
        if num_on_cpu is not None:
            self._on_cpu = (self._on_cpu or 0) + num_on_cpu

    def read(self) -> dict[str, float]:
        """Returns the rates, and starts a new window.

        The rates are images_per_s, tflops, mfu (0 to 1), data_wait (share of the time),
        peak_memory_gib (see `peak_memory_bytes`) and, where a device decodes, decoded_on_cpu (share
        of the images). tflops and mfu include recomputation. Call it
        when the device is idle, for example after reading a value from it: on a GPU, work in
        progress counts as done.
        """
        seconds = time.perf_counter() - self._start
        images_per_s = self._images / seconds
        tflops = images_per_s * self._flops_per_image / 1e12
        rates = {
            "images_per_s": images_per_s,
            "tflops": tflops,
            "mfu": tflops / self._peak_tflops,
            "data_wait": self._wait_s / seconds,
            "peak_memory_gib": peak_memory_bytes(self._device) / 2**30,
        }
        if self._on_cpu is not None:
            rates["decoded_on_cpu"] = self._on_cpu / max(1, self._images)
        self._open_window()
        return rates

    def _open_window(self) -> None:
        self._start, self._images, self._wait_s = time.perf_counter(), 0, 0.0
        self._on_cpu = None


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory since the process started: of tensors on a GPU, of the whole process
    on the CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def measure_peak_tflops(device: torch.device, precision: Precision) -> float:
    """Measures the best rate of several short runs of square matrix products.

    The size doubles while time is left. This takes about 0.3 s after loading the libraries, longer
    on a busy or slow machine, and seconds in a precision that the machine emulates.
    """
    best, size, tries = 0.0, _FIRST_SIZE, 0
    # The first product loads libraries, so it is not timed.
    _product_seconds(size, device, _DTYPES[precision])
    deadline = time.perf_counter() + _MEASURING_S
    while tries < _MIN_TRIES or time.perf_counter() < deadline:
        seconds = _product_seconds(size, device, _DTYPES[precision])
        best, tries = max(best, 2.0 * size**3 / seconds / 1e12), tries + 1
        larger_s = 8 * (_RUNS + 1) * seconds
        allowed_s = _RELIABLE_S if size < _RELIABLE_SIZE else deadline - time.perf_counter()
        if size < _LAST_SIZE and larger_s < allowed_s:
            size *= 2
    return best


def _product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(size)
    # Random values, because a GPU multiplies zeros faster.
    matrix = torch.randn((size, size), generator=generator, device=device).to(dtype)
    times = []
    for run in range(_RUNS + 1):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        # The first run loads the kernels of this size, so it is not timed.
        if run:
            times.append(time.perf_counter() - start)
    return min(times)
