"""Images per second of the engine torch on one device, alone and with labels for each image.

    python benchmarks/encode_device.py --device cuda [--tower b32|l14] [--centers 1000000]
                                       [--batches 1 32 256 1024 4096] [--runs 5]

On noise, in this process, interleaved: the engine in fp32 and bf16, with its share of the best rate
of square matrix products that was measured before; the fastest of them without compiled blocks, and
also with the convolution of normalized pixels; and, at batches of 32 and 256, the engine in
bf16 with the 8 nearest of random centers, as a Triton with them on the GPU finds labels
(cuda-bf16), and as the server does on the CPU (numpy). The labels of the largest of these batches
must be the same, or the exit status is 1. Above 256 images, where the engine computes several
parts, it is timed in its fastest precision alone. Where a CPU has no bf16, the engine is in fp32.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from unittest.mock import patch

import numpy as np
import torch
from assign import in_blocks
from encode import GIGA, TOWERS, Encode, flops_per_image, random_model, tower_config

from mlcd.clustering.arithmetics import MatmulName
from mlcd.clustering.nearest import CenterScan
from mlcd.encoders import torch as engine
from mlcd.encoders.encoder import Precision
from mlcd.encoders.torch import CUDA_BATCH, TorchEncoder, computes_bf16
from mlcd.models.servable import Servable
from mlcd.training.telemetry.throughput import measure_peak_tflops
from mlcd.types import Embeddings, unit_rows

_TOP = 8
_LABELED = (32, 256)  # a million centers by numpy cost a second for a few hundred images


@dataclass(frozen=True)
class Work:
    """A piece of work that is timed.

    run: takes the number of images. limit: in TFLOP/s, where the work is compared with it. batches:
    those that it is timed at.
    """

    title: str
    run: Callable[[int], object]
    batches: tuple[int, ...]
    limit: float | None = None


def main() -> None:
    options = read_options()
    device, config = torch.device(options.device), tower_config(options.tower)
    precisions: list[Precision] = ["fp32"]
    precisions += ["bf16"] if options.device == "cuda" or computes_bf16() else []
    limit = {each: measure_peak_tflops(device, each) for each in precisions}
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    rates = ", ".join(f"{each} {rate:.3g}" for each, rate in limit.items())
    print(f"{name}: measured matrix limit in TFLOP/s: {rates}")
    flops = flops_per_image(config)
    print(f"{options.tower}: {flops / GIGA:.2f} GFLOP per image; medians (least to most)")
    shape = (max(options.batches), 3, config.image_size, config.image_size)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    model = random_model(config)
    encoders = {each: open_encoder(model, each, options.device) for each in precisions}
    scans = open_scans(options.centers, config.output_dim, options.device)
    fastest, encode = list(encoders.items())[-1]
    earlier = {
        "plain blocks": {"compile_blocks": lambda *_: None},
        "plain blocks, convolution": {
            "compile_blocks": lambda *_: None,
            "fold_pixels": keep_convolution,
        },
    }
    one_part = [num for num in options.batches if num <= CUDA_BATCH]
    works = [
        Work(
            f"torch-{each}",
            lambda num, encode=encode: encode(images[:num]),
            tuple(options.batches if each == fastest else one_part),
            limit[each],
        )
        for each, encode in encoders.items()
    ]
    for title, parts in earlier.items():
        with ExitStack() as stack:
            for name, replaced in parts.items():
                stack.enter_context(patch.object(engine, name, replaced))
            form = open_encoder(model, fastest, options.device)
        works.append(
            Work(
                f"torch-{fastest}, {title}",
                lambda num, form=form: form(images[:num]),
                tuple(options.batches),
                limit[fastest],
            )
        )
    labeled = tuple(num for num in options.batches if num in _LABELED)
    works += [
        Work(
            f"torch-{fastest}, labels by {matmul}",
            lambda num, scan=scan: scan.nearest(encode(images[:num]), _TOP),
            labeled,
        )
        for matmul, scan in scans.items()
    ]
    for num, work, times in timed(works, options):
        low, middle, high = (num / s for s in (max(times), statistics.median(times), min(times)))
        line = f"  batch {num:4} {work.title} {middle:,.1f} images/s ({low:,.1f} to {high:,.1f})"
        if work.limit is not None:
            tflops = middle * flops / 1e12
            line += f", {tflops:.3g} TFLOP/s, {tflops / work.limit:.1%} of the matrix limit"
        print(line)
    audited = images[: max(labeled, default=min(options.batches))]
    sys.exit(0 if agree(scans, encode(audited)) else 1)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tower", choices=sorted(TOWERS), default="b32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256, 1024, 4096])
    parser.add_argument("--centers", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def open_encoder(model: Servable, precision: Precision, device: str) -> Encode:
    return TorchEncoder(
        deepcopy(model),  # the engine rounds weights in place
        name="random",
        fingerprint="",
        preprocess=model.preprocess,
        precision=precision,
        device=device,
    ).encode


class NormalizedPatches(torch.nn.Module):
    """The patches of normalized pixels by the model's own convolution."""

    def __init__(self, model: Servable) -> None:
        super().__init__()
        self.patch, self.normalize = model.trunk.patch, model.normalize

    def forward(self, image_u8: torch.Tensor) -> torch.Tensor:
        patches: torch.Tensor = self.patch(self.normalize(image_u8).to(self.patch.weight.dtype))
        return patches


def keep_convolution(model: Servable) -> None:
    model.trunk.register_module("patch", NormalizedPatches(model))


def open_scans(num_centers: int, dimension: int, device: str) -> dict[str, CenterScan]:
    """Returns the ways to the labels, by the name of their arithmetic."""
    centers = in_blocks((num_centers, dimension), lambda _, noise: unit_rows(noise))
    names: list[MatmulName] = ["cuda-bf16" if device == "cuda" else "torch-int8", "numpy"]
    return {name: CenterScan(centers, matmul=name) for name in names}


def timed(
    works: Sequence[Work], options: argparse.Namespace
) -> Iterator[tuple[int, Work, list[float]]]:
    """Yields each batch and work with its seconds, which were measured in turns."""
    seconds: dict[tuple[int, Work], list[float]] = {}
    # The first run warms up, and records the graphs of a GPU.
    for run in range(-1, options.runs):
        for num, work in product(options.batches, works):
            if num not in work.batches:
                continue
            began = time.perf_counter()
            work.run(num)
            taken = time.perf_counter() - began
            seconds.setdefault((num, work), []).extend([taken] if run >= 0 else [])
    for (num, work), times in seconds.items():
        yield num, work, times


def agree(scans: dict[str, CenterScan], rows: Embeddings) -> bool:
    """Tells, and prints, if all ways find the same labels."""
    found = [scan.nearest(rows, _TOP) for scan in scans.values()]
    same = all(
        np.array_equal(each.ids, found[0].ids) and np.array_equal(each.scores, found[0].scores)
        for each in found
    )
    print(f"labels of {len(rows)} images are the same by {', '.join(scans)}: {same}")
    return same


if __name__ == "__main__":
    main()
