"""A model in int8, as `mlcd quantize` makes it of a user's images, against its fp32 and bf16.

    pip install 'mlcd[quantize]'
    python benchmarks/int8.py demo/model demo/images [--num 256]

A model that has a graph in int8 is taken as it is. It is compared on images that were held out: the
cosine of each row to fp32, whether the nearest other image and the nearest of 1,000 random centers
are the same, and, interleaved, images per second and CPU time. The cosine between different images
says how much a cosine to fp32 is worth: where all rows lie close together, it is high in any case.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from serve import Figures

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.manifest import read_manifest
from mlcd.cores import available_cores, cpu_features
from mlcd.encoders import open_encoder
from mlcd.encoders.openvino import INT8_GRAPH, computes_bf16, computes_int8
from mlcd.encoders.options import EncoderOptions
from mlcd.export.int8_agreement import compare_rows
from mlcd.images.prefetch import prepare_all
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.pipelines.quantize import choose, quantize_model
from mlcd.progress import Reporter
from mlcd.types import Embeddings, ImageBatch, unit_rows

BATCH = 8
CENTERS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="A directory of `mlcd export` or `quantize`.")
    parser.add_argument("images", help="A folder of pictures.")
    parser.add_argument("--num", type=int, default=256, help="Images to calibrate on.")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{available_cores()} cores, {', '.join(sorted(cpu_features()))}")
    if not computes_int8():
        print("this CPU has neither VNNI nor AMX, so it computes no int8")
        return
    with TemporaryDirectory() as folder:
        model = with_int8(options, Path(folder))
        arms = {name: opened(model, name) for name in precisions()}
        held_out = read_held_out(options.images, model, options.num)
        compare(arms, held_out)
        measure(arms, held_out[: options.batch], options.rounds)


def with_int8(options: argparse.Namespace, folder: Path) -> Path:
    """Returns the model with a graph in int8, made now where it has none."""
    given: Path = options.model
    if INT8_GRAPH in read_manifest(given).files:
        return given
    started = time.process_time()
    # a bar of 0: to measure what the command would refuse
    made = quantize_model(
        str(given),
        options.images,
        folder / "model",
        num=options.num,
        min_cosine=0.0,
        reporter=Reporter("silent"),
    )
    num = made.summary["int8_calibration_images"]
    print(f"quantized in {time.process_time() - started:.0f} s of CPU on {num} images")
    return made.path


def precisions() -> list[Any]:
    return ["fp32", *(["bf16"] if computes_bf16() else []), "int8"]


def opened(model: Path, precision: Any) -> Callable[..., Embeddings]:
    options = EncoderOptions(precision=precision, engine="openvino")
    return open_encoder(str(model), options).encode


def read_held_out(folder: str, model: Path, num: int) -> ImageBatch:
    """Returns prepared images [N, 3, S, S] on which the model was not calibrated."""
    source, spec = open_source(folder), PreprocessSpec.read(model / "preprocess.json")
    entries = source.entries.select(choose(source.entries, num)[1])
    prepared = prepare_all(source, entries, spec, num_threads=available_cores())
    return np.stack([each.pixels for each in prepared if each.pixels is not None])


def compare(arms: dict[str, Any], images: ImageBatch) -> None:
    rows = {name: encode(images) for name, encode in arms.items()}
    exact = rows["fp32"]
    vectors = unit_rows(np.random.default_rng(1).standard_normal((CENTERS, exact.shape[1])))
    centers = Centers(vectors, np.ones(CENTERS, np.int64), fingerprint="")
    others = (exact @ exact.T)[~np.eye(len(exact), dtype=bool)]
    print(f"cosine between different images: mean {others.mean():.4f}, least {others.min():.4f}")
    for name, found in rows.items():
        by_centers, by_images = (
            compare_rows(exact, found, centers),
            compare_rows(exact, found, None),
        )
        print(
            f"{name}: cosine to fp32 mean {by_centers.mean_cosine:.5f},"
            f" least {by_centers.min_cosine:.5f} of {len(exact)}; same nearest center"
            f" {by_centers.same_label:.0%}, same nearest image {by_images.same_label:.0%}"
        )


def measure(arms: dict[str, Any], batch: ImageBatch, rounds: int) -> None:
    figures = Figures()
    for _ in range(rounds):
        for name, encode in arms.items():
            used_before, started = time.process_time(), time.perf_counter()
            encode(batch)
            spent = time.perf_counter() - started
            figures.add(f"{name} rate", len(batch) / spent)
            used = time.process_time() - used_before
            figures.add(f"{name} cpu", 1000 * used / len(batch))
    print(f"batches of {len(batch)}, {rounds} interleaved rounds: median (smallest to largest)")
    for name in arms:
        rate, cpu = figures.show(f"{name} rate", "images/s"), figures.show(f"{name} cpu", "ms")
        print(f"{name}: {rate}, {cpu} of CPU an image")
    for name in arms:
        if name != "int8":
            print(f"int8 / {name}, images/s {figures.ratio('int8 rate', f'{name} rate')}")
            print(f"{name} / int8, CPU      {figures.ratio(f'{name} cpu', 'int8 cpu')}")


if __name__ == "__main__":
    main()
