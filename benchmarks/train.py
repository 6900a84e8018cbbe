"""Training on this machine: images per second, waiting for data, and the share of the matrix limit.

    python benchmarks/train.py [--tower small|b32|l14] [--classes K] [--ratio R] [--batch B]
                               [--device cpu|cuda] [--workers N] [--curve-steps N]

The forms take turns within each run, on the same tower, batch and precision (bf16 on CUDA, fp32 on
the CPU):

  synthetic  our step on images that are decoded and in memory: augmentation, tower, sampled head,
             clipping, AdamW
  loader     the same with the real loader, which decodes every image from tar shards (JPEGs of
             --side pixels, quality 90, cut from scikit-learn's two photographs)
  device     the same with data.decode=device, where nvImageCodec is installed; its crops are
             compared with those of the CPU
  plain      a plain PyTorch loop: torch's cross entropy over all classes, one label, a dense AdamW;
             images as synthetic
  head       forward, backward and update of our head alone, on embeddings of the batch: its share
             of our step

Each is printed as soon as it is timed, with the seconds since the start, so that a run that is cut
short has shown what it measured. The matrix limit is the best rate of square products, measured
before each run, the best of all runs. TFLOP/s count what each form computes. Figures of the end are
medians of the runs, with minimum and maximum; the ratio to `plain` is the median of the runs'
ratios. Peak memory is that of our step alone.

With --curve-steps a run in bf16 and one in fp32 then take the first steps, of --curve-batch images,
from the same weights on the same batches; the learning rate rises for a tenth of them. Lines of
JSON hold the figures, with both curves.
"""

import argparse
import hashlib
import io
import itertools
import json
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.nn import functional

from mlcd.errors import ConfigInvalid
from mlcd.images.sources import open_source
from mlcd.training.config import RunConfig, load_config
from mlcd.training.data.dataset import Dataset, Part
from mlcd.training.data.loader import Loader, StepBatches
from mlcd.training.flops import backbone_flops, head_flops, step_flops
from mlcd.training.head.row_gradients import sum_duplicate_rows
from mlcd.training.head.state import TrainState
from mlcd.training.optim.groups import parameter_groups
from mlcd.training.processes import Processes
from mlcd.training.run.run_training import initial_state
from mlcd.training.step import train_step
from mlcd.training.telemetry.throughput import (
    Throughput,
    measure_peak_tflops,
    peak_memory_bytes,
)
from mlcd.world import World

RECIPES: Final = {"small": "small", "b32": "vit-b32-1m", "l14": "vit-l14-1m"}
NUM_SHARDS: Final = 4
WARM_UP: Final = 1
BEGAN: Final = time.perf_counter()


@dataclass(frozen=True)
class Form:
    """A form: its name, and a function that takes one step and returns the wait for its images."""

    name: str
    step: Callable[[], float]
    flops_per_image: float


def write_shards(folder: Path, num_images: int, side: int) -> None:
    """Writes cuts of two photographs as JPEGs in tar shards, all different."""
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    generator = np.random.default_rng(0)
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"cuts-{shard}.tar", "w") as tar:
            for number in range(shard, num_images, NUM_SHARDS):
                photograph = photographs[number % len(photographs)]
                part = int(generator.integers(min(photograph.size) // 2, min(photograph.size)))
                left, top = (int(generator.integers(0, size - part)) for size in photograph.size)
                buffer = io.BytesIO()
                cut = photograph.resize(
                    (side, side), Image.Resampling.BICUBIC, (left, top, left + part, top + part)
                )
                cut.save(buffer, "JPEG", quality=90)
                member = tarfile.TarInfo(f"{number:06d}.jpg")
                member.size = buffer.tell()
                buffer.seek(0)
                tar.addfile(member, buffer)


def read_dataset(folder: Path, num_classes: int, labels_per_image: int) -> Dataset:
    """Reads the shards with random labels."""
    source = open_source(str(folder / "*.tar"))
    entries = source.entries
    labels = np.random.default_rng(1).integers(0, num_classes, (len(entries), labels_per_image))
    digests = b"".join(hashlib.sha256(source.read(entry)).digest() for entry in entries)
    sha256 = np.frombuffer(digests, dtype=np.uint8).reshape(len(entries), -1)
    part = Part(source, entries, labels.astype(np.int32), sha256, 1.0)
    return Dataset((part,), 0, 0, num_classes, None, ())


def ours(
    name: str,
    state: TrainState,
    batches: Iterator[StepBatches],
    config: RunConfig,
) -> Form:
    """Returns our step, as the loop takes it on one process."""

    def step() -> float:
        batch = next(batches)
        shares = [len(part.labels) / config.schedule.batch_size for part in batch.parts]
        train_step(state, batch.parts, shares, config)
        state.step += 1
        return batch.wait_s

    return Form(name, step, step_flops(config, state.head.shard.num_classes))


def plain(config: RunConfig, num_classes: int, batch: StepBatches, device: torch.device) -> Form:
    state = initial_state(config, 2, Processes(World(), device))
    tower = state.model
    classifier = nn.Parameter(
        0.01 * torch.randn(num_classes, config.model.output_dim, device=device)
    )
    groups = parameter_groups(tower.trunk, config.optim)
    optimizer = torch.optim.AdamW([*groups, {"params": [classifier]}], lr=config.optim.lr)
    scale, bf16 = config.loss.resolve_scale(num_classes), config.compute.precision == "bf16"
    num_parts = len(batch.parts)

    def step() -> float:
        for part in batch.parts:
            pixels = part.images.to(device, non_blocking=True).float()
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                embeddings = tower.embed(pixels)
                cosines = (
                    functional.normalize(embeddings, dim=1)
                    @ functional.normalize(classifier, dim=1).T
                )
            loss = (
                functional.cross_entropy(scale * cosines.float(), part.labels[:, 0].to(device))
                / num_parts
            )
            loss.backward()
        parameters = [*tower.parameters(), classifier]
        nn.utils.clip_grad_norm_(parameters, config.optim.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return 0.0

    return Form("plain", step, backbone_flops(config) + 6.0 * config.model.output_dim * num_classes)


def head_alone(config: RunConfig, num_classes: int, batch: StepBatches, state: TrainState) -> Form:
    """Returns the step of the head alone, which updates the centers of `state`."""
    shape = (config.schedule.batch_size // config.compute.accumulation, config.model.output_dim)
    embeddings = torch.randn(shape, device=state.device).requires_grad_()
    labels = [part.labels.to(state.device) for part in batch.parts]

    def step() -> float:
        for part in labels:
            (state.head(embeddings[: len(part)], part, state.step).loss / len(labels)).backward()
            if len(labels) > 1:
                sum_duplicate_rows(state.head.weight)
        state.center_optimizer.step()
        state.center_optimizer.zero_grad(set_to_none=True)
        embeddings.grad = None
        state.step += 1
        return 0.0

    return Form("head", step, head_flops(config, num_classes))


def timed(form: Form, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    for _ in range(WARM_UP):
        form.step()
    finish(device)
    throughput = Throughput(form.flops_per_image, 1.0, device)
    began = time.perf_counter()
    for _ in range(options.steps):
        throughput.add(options.batch, form.step())
    finish(device)
    return {**throughput.read(), "seconds": (time.perf_counter() - began) / options.steps}


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(config: RunConfig, options: argparse.Namespace, device: torch.device) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder, options.images, options.side)
        dataset = read_dataset(folder, options.classes, config.loss.labels_per_image)
        tell("images", f"{len(dataset)} in {NUM_SHARDS} shards")
        loaders = {"loader": config}
        # in threads: processes take long to start where torch does
        in_threads = with_data(config, workers=0)
        batch = first_batch(dataset, in_threads, device)
        if (on_device := compare_decoders(dataset, in_threads, batch, device)) is not None:
            loaders["device"] = with_data(config, decode="device")
        state = initial_state(config, options.classes, Processes(World(), device))
        synthetic = ours("synthetic", state, itertools.repeat(batch), config)
        synthetic.step()
        finish(device)
        peak_memory_gib = peak_memory_bytes(device) / 2**30
        tell("memory", f"{peak_memory_gib:.3g} GiB at its peak, of our step alone")
        forms = [
            synthetic,
            plain(config, options.classes, batch, device),
            head_alone(config, options.classes, batch, state),
        ]
        results: dict[str, list[dict[str, float]]] = {}
        limit_tflops = 0.0
        for run in range(options.runs):
            limit_tflops = max(limit_tflops, measure_peak_tflops(device, config.compute.precision))
            for form in forms:
                keep(timed(form, options, device), form.name, results)
            # Each run has a loader of its own, which must neither decode while others are timed nor
            # be ahead.
            first = run * (options.steps + WARM_UP + config.data.prefetch_steps)
            for loader_name, loading in loaders.items():
                with (
                    open_loader(dataset, loading, device, first) as loader,
                    state.copies.prefetch_first_images(iter(loader)) as steps,
                ):
                    batches = itertools.islice(steps, config.data.prefetch_steps, None)
                    form = ours(loader_name, state, batches, loading)
                    keep(timed(form, options, device), form.name, results)
        figures = report(results, limit_tflops, config, options)
        figures |= {"peak_memory_gib": peak_memory_gib, "decoded_on_device": on_device}
        print(json.dumps(figures), flush=True)
        del state, synthetic, forms, form, batches
        if options.curve_steps:
            draw_curves(dataset, config, options, device)


def with_data(config: RunConfig, **settings: object) -> RunConfig:
    return config.model_copy(update={"data": config.data.model_copy(update=settings)})


def open_loader(
    dataset: Dataset, config: RunConfig, device: torch.device, start_step: int
) -> Loader:
    return Loader(dataset, config, rank=0, size=1, device=device, start_step=start_step)


def first_batch(dataset: Dataset, config: RunConfig, device: torch.device) -> StepBatches:
    with open_loader(dataset, config, device, 0) as loader:
        return replace(next(iter(loader)), wait_s=0.0)


def compare_decoders(
    dataset: Dataset, config: RunConfig, batch: StepBatches, device: torch.device
) -> dict[str, float] | None:
    """Returns how far the crops of data.decode=device are from those of `batch`; None without
    nvImageCodec.
    """
    try:
        other = first_batch(dataset, with_data(config, decode="device"), device)
    except ConfigInvalid as error:
        tell("device", f"left out: {error}")
        return None
    ours, exact = (
        torch.cat([part.images.cpu() for part in each.parts]).double() for each in (other, batch)
    )
    cosines = torch.cosine_similarity(ours.flatten(1), exact.flatten(1))
    found = {
        "mean_cosine": cosines.mean().item(),
        "min_cosine": cosines.min().item(),
        "largest_difference": (ours - exact).abs().max().item(),
        "decoded_on_cpu": (other.num_on_cpu or 0) / len(ours),
    }
    tell("device", ", ".join(f"{name} {value:.6g}" for name, value in found.items()))
    return found


def draw_curves(
    dataset: Dataset, config: RunConfig, options: argparse.Namespace, device: torch.device
) -> None:
    """Trains the first steps in bf16 and in fp32, and prints both losses."""
    # all images are held after the first epoch, so that decoding takes no time
    shared = with_data(config, memory_gib=4.0)
    schedule = config.schedule.model_copy(update={"batch_size": options.curve_batch})
    optim = config.optim.model_copy(update={"warmup_steps": options.curve_steps // 10})
    losses: dict[str, list[float]] = {}
    for precision in ("bf16", "fp32"):
        compute = config.compute.model_copy(update={"precision": precision})
        run = shared.model_copy(update={"schedule": schedule, "optim": optim, "compute": compute})
        state = initial_state(run, options.classes, Processes(World(), device))
        steps = []
        with open_loader(dataset, run, device, 0) as loader:
            for batch in itertools.islice(loader, options.curve_steps):
                shares = [len(part.labels) / options.curve_batch for part in batch.parts]
                steps.append(train_step(state, batch.parts, shares, run).loss)
                state.step += 1
        losses[precision] = torch.stack(steps).tolist()
        tell(precision, f"loss {losses[precision][0]:.6g} to {losses[precision][-1]:.6g}")
        del state
    difference = max(
        abs(low / full - 1) for low, full in zip(losses["bf16"], losses["fp32"], strict=True)
    )
    print(json.dumps({"losses": losses, "largest_relative_difference": difference}))
    tell(
        "curves",
        f"{options.curve_steps} steps of {options.curve_batch} images: the losses in bf16 and fp32 "
        f"differ by at most {100 * difference:.3g} %",
    )


def tell(name: str, found: str) -> None:
    print(f"  {time.perf_counter() - BEGAN:6.1f} s  {name:10} {found}", flush=True)


def keep(found: dict[str, float], name: str, results: dict[str, list[dict[str, float]]]) -> None:
    """Adds what a form was found to take to the results, and prints it."""
    results.setdefault(name, []).append(found)
    tell(name, f"{found['images_per_s']:.4g} images/s, {found['tflops']:.3g} TFLOP/s")


def report(
    results: dict[str, list[dict[str, float]]],
    limit_tflops: float,
    config: RunConfig,
    options: argparse.Namespace,
) -> dict[str, object]:
    """Prints the medians, and returns them by form."""
    tower, head = backbone_flops(config) / 1e9, head_flops(config, options.classes) / 1e9
    print(
        f"  matrix limit {limit_tflops:.3g} TFLOP/s; FLOPs an image: tower {tower:.4g} G, head "
        f"{head:.4g} G"
    )
    figures: dict[str, object] = {
        "matrix_limit_tflops": limit_tflops,
        "tower_gflops": tower,
        "head_gflops": head,
    }
    for name, runs in results.items():
        if name == "head":
            continue
        ratios = [
            each["images_per_s"] / other["images_per_s"]
            for each, other in zip(runs, results["plain"], strict=True)
        ]
        mfu = [each["tflops"] / limit_tflops for each in runs]
        print(
            f"  {name:10} {spread([each['images_per_s'] for each in runs], '.4g')} images/s,"
            f" {statistics.median(ratios):.2f}x plain,"
            f" data wait {spread([100 * each['data_wait'] for each in runs], '.1f')} %,"
            f" {statistics.median(each['tflops'] for each in runs):.3g} TFLOP/s,"
            f" {spread([100 * share for share in mfu], '.1f')} % of the limit"
        )
        medians = {
            key: statistics.median(each[key] for each in runs)
            for key in ("images_per_s", "data_wait")
        }
        figures[name] = {**medians, "mfu": statistics.median(mfu)}
    shares = [
        head["seconds"] / whole["seconds"]
        for head, whole in zip(results["head"], results["synthetic"], strict=True)
    ]
    print(
        f"  head       {spread([100 * share for share in shares], '.1f')} % of our step, at k = "
        f"{options.classes}"
    )
    return {**figures, "head_share": statistics.median(shares)}


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tower", choices=RECIPES, default="small")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument(
        "--ratio", type=float, help="share of classes drawn [default: the recipe's]"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=6, help="timed together")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--images", type=int, default=1024, help="in the shards")
    parser.add_argument(
        "--side", type=int, default=256, help="of the images in the shards, in pixels"
    )
    parser.add_argument(
        "--workers", type=int, help="processes that decode [default: one for each core]"
    )
    parser.add_argument(
        "--curve-steps", type=int, default=0, help="of the losses in bf16 and fp32 [default: none]"
    )
    parser.add_argument("--curve-batch", type=int, default=256)
    options = parser.parse_args()
    device = torch.device(options.device)
    overrides = [
        "data.images=IMAGES",
        "data.labels=LABELS",
        "data.memory_gib=0",
        "out=RUN",
        f"schedule={{steps: 1000000, batch_size: {options.batch}}}",
        f"compute={{precision: {'bf16' if device.type == 'cuda' else 'fp32'}}}",
    ]
    if options.workers is not None:
        overrides.append(f"data.workers={options.workers}")
    if options.ratio is not None:
        overrides.append(f"loss.negative_ratio={options.ratio}")
    config = load_config(RECIPES[options.tower], overrides)
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    ratio, precision = config.loss.resolve_ratio(options.classes), config.compute.precision
    print(
        f"{options.tower}, k = {options.classes}, r = {ratio}, B = {options.batch}, {precision} on "
        f"{where}",
        flush=True,
    )
    measure(config, options, device)


if __name__ == "__main__":
    main()
