"""The loader with and without views: photographs per second, and what colors cost.

    python benchmarks/views.py [--recipe small|vit-b32-1m] [--workers N] [--runs N] [--clock cpu]

The forms take turns within each run, on JPEGs of --side pixels (quality 90, cut from
scikit-learn's two photographs) in tar shards, decoded anew each time:

  one         one view: crop and flip
  colors      the same with jitter, gray, blur and solarize
  two         two views with all changes of color
  multi-crop  two views and six local ones of 3/7 of the side (rounded to patches), as DINO's

A form's rate is of photographs, whichever the number of its crops; its ratio is to `one` of the
same run. Colors are changed where the tower is, so the time for them is measured apart, on the
--device, and counted in `with colors`: the rate if nothing of it overlapped with decoding.
`resizes` are Pillow's bicubic resizes of the same boxes, without anything else.

Figures are medians of the runs, with minimum and maximum. On a machine that others use,
`--clock cpu` counts the processor time of this process, with the decoders in its threads and one
thread for the colors; a rate is then that of one core.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from train import read_dataset, spread, write_shards

from mlcd.training.config import RunConfig, load_config
from mlcd.training.data.augment import crop_boxes
from mlcd.training.data.colors import draw_colors
from mlcd.training.data.dataset import Dataset
from mlcd.training.data.loader import Batch, Loader
from mlcd.training.data.recoloring import recolor

COLORS: Final[dict[str, Any]] = {
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.2,
    "hue": 0.1,
    "grayscale": 0.2,
}
Clock = Callable[[], float]
CLOCKS: Final[dict[str, Clock]] = {"wall": time.perf_counter, "cpu": time.process_time}
NUM_LABELS: Final = 8
WARM_UP: Final = 2


def forms(config: RunConfig) -> dict[str, RunConfig]:
    """Returns the configuration of each form."""
    size, patch = config.model.image_size, config.model.patch_size
    local = {"local_views": 6, "local_size": max(1, round(size * 3 / 7 / patch)) * patch}
    changes: dict[str, dict[str, Any]] = {
        "one": {},
        "colors": {**COLORS, "blur": 0.5, "solarize": 0.1},
        "two": {"views": 2, **COLORS, "blur": (1.0, 0.1), "solarize": (0.0, 0.2)},
        "multi-crop": {
            "views": 2, **local, **COLORS, "blur": (1.0, 0.1, 0.5), "solarize": (0.0, 0.2, 0.0)
        },
    }  # fmt: skip
    return {
        name: RunConfig.model_validate(
            {**config.model_dump(), "augment": {**config.augment.model_dump(), **change}}
        )
        for name, change in changes.items()
    }


def decoded(
    dataset: Dataset, config: RunConfig, first: int, steps: int, clock: Clock
) -> tuple[float, Batch]:
    """Returns the seconds of a step of the loader, and the last batch."""
    with Loader(dataset, config, rank=0, size=1, start_step=first) as loader:
        batches = iter(loader)
        for _ in itertools.islice(batches, WARM_UP + config.data.prefetch_steps):
            pass
        began = clock()
        for step in itertools.islice(batches, steps):
            (batch,) = step.parts
        return (clock() - began) / steps, batch


def resized(config: RunConfig, side: int, count: int, clock: Clock) -> float:
    """Returns the seconds that the bicubic resizes of so many photographs take, all their views."""
    augment, positions = config.augment, np.arange(count)
    sides = np.full(count, side)
    image = Image.effect_noise((side, side), 64).convert("RGB")
    views = [
        (
            augment.size_of(view, config.model.image_size),
            crop_boxes(sides, sides, positions, augment, config.seed, view),
        )
        for view in range(augment.num_views)
    ]
    began = clock()
    for index in range(count):
        for size, boxes in views:
            image.resize((size, size), Image.Resampling.BICUBIC, box=boxes.corners(index))
    return clock() - began


def recolored(batch: Batch, config: RunConfig, device: torch.device, clock: Clock) -> float:
    """Returns the seconds that the changes of color of one batch take."""
    views = [
        images.to(device, non_blocking=True).float() for images in (batch.images, *batch.more_views)
    ]
    finish(device)
    began = clock()
    for number, pixels in enumerate(views):
        colors = draw_colors(batch.positions, config.augment, config.seed, number)
        if colors is not None:
            recolor(pixels, colors)
    finish(device)
    return clock() - began


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(config: RunConfig, options: argparse.Namespace, device: torch.device) -> None:
    seconds: dict[str, list[float]] = {}
    color_seconds: dict[str, list[float]] = {}
    resize_seconds: dict[str, list[float]] = {}
    clock = CLOCKS[options.clock]
    with tempfile.TemporaryDirectory() as name:
        write_shards(Path(name), options.images, options.side)
        dataset = read_dataset(Path(name), 1000, NUM_LABELS)
        for run, (form, changed) in itertools.product(range(options.runs), forms(config).items()):
            taken, batch = decoded(dataset, changed, run * 1000, options.steps, clock)
            seconds.setdefault(form, []).append(taken)
            color_seconds.setdefault(form, []).append(recolored(batch, changed, device, clock))
            resizes = resized(changed, options.side, options.batch, clock)
            resize_seconds.setdefault(form, []).append(resizes)
    for form, changed in forms(config).items():
        both = [sum(each) for each in zip(seconds[form], color_seconds[form], strict=True)]
        ratios, with_colors = (
            [one / each for one, each in zip(seconds["one"], of_form, strict=True)]
            for of_form in (seconds[form], both)
        )
        rates = [options.batch / each for each in seconds[form]]
        colors, resizes = (
            1000 * statistics.median(each[form]) / options.batch
            for each in (color_seconds, resize_seconds)
        )
        print(
            f"  {form:10} {changed.augment.num_views} crops: {spread(rates, '.4g')} photographs/s,"
            f" {spread(ratios, '.2f')} of one view; resizes {resizes:.2f} ms a photograph, colors"
            f" {colors:.2f}, {spread(with_colors, '.2f')} with colors"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="vit-b32-1m")
    parser.add_argument("--workers", type=int, help="[default: the cores]")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="timed together")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--images", type=int, default=512, help="in the shards")
    parser.add_argument("--side", type=int, default=400, help="of the images, in pixels")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    if options.clock == "cpu":
        options.workers = 0
        torch.set_num_threads(1)
    overrides = [
        "data.images=IMAGES",
        "data.labels=LABELS",
        "data.memory_gib=0",
        "out=RUN",
        f"loss={{labels_per_image: {NUM_LABELS}}}",
        f"schedule={{steps: 1000000, batch_size: {options.batch}}}",
        "compute={}",
        "optim={}",
    ]
    if options.workers is not None:
        overrides.append(f"data.workers={options.workers}")
    config = load_config(options.recipe, overrides)
    size = config.model.image_size
    print(
        f"{options.recipe}, {size} px from JPEGs of {options.side} px, "
        f"{options.clock} clock, colors on {options.device}"
    )
    measure(config, options, torch.device(options.device))


if __name__ == "__main__":
    main()
