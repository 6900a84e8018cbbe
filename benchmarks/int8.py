"""An exported model in int8, quantized by NNCF on a user's images, against its fp32 and bf16.

    pip install nncf
    python benchmarks/int8.py demo/model demo/images [--num 64] [--kind vit|cnn]

It calibrates on --num images and compares on as many others: the cosine of each row to fp32,
whether the nearest other image and the nearest of 1,000 random centers are the same, and,
interleaved, images per second and CPU time. The cosine between different images says how much a
cosine to fp32 is worth: where all rows lie close together, it is high in any case.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from serve import Figures

from mlcd.encoders.openvino import OpenVinoEncoder, computes_bf16, read_onnx
from mlcd.images.sources import open_source
from mlcd.images.transform import PreprocessSpec
from mlcd.types import Embeddings, unit_rows

BATCH = 8
CENTERS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="A directory made by `mlcd export`.")
    parser.add_argument("images", help="A folder of pictures.")
    parser.add_argument("--num", type=int, default=64, help="Images to calibrate on.")
    parser.add_argument("--kind", choices=["vit", "cnn"], default="vit")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    spec = PreprocessSpec.read(options.model / "preprocess.json")
    images = read_images(options.images, spec, 2 * options.num)
    calibrated, held = images[::2], images[1::2]
    graph = options.model / "model.onnx"
    started = time.perf_counter()
    small = quantized(read_onnx(graph), calibrated, options.kind)
    print(f"quantized in {time.perf_counter() - started:.0f} s on {len(calibrated)} images")
    arms: dict[str, Any] = {"fp32": opened(read_onnx(graph), spec, "fp32")}
    if computes_bf16():
        arms["bf16"] = opened(read_onnx(graph), spec, "bf16")
    arms["int8"] = opened(small, spec, "fp32")
    compare(arms, held)
    measure(arms, held[:BATCH], options.rounds)


def read_images(folder: str, spec: PreprocessSpec, num: int) -> NDArray[np.uint8]:
    """Returns prepared images [num, 3, S, S] from all over the folder."""
    source = open_source(folder)
    entries = [*source.entries]
    chosen = np.random.default_rng(0).permutation(len(entries))[:num]
    return np.stack([spec.prepare(source.read(entries[index])) for index in chosen])


def quantized(model: ov.Model, images: NDArray[np.uint8], kind: str) -> ov.Model:
    try:
        import nncf
    except ModuleNotFoundError as error:
        raise SystemExit("int8 is made by NNCF: pip install nncf") from error
    found: ov.Model = nncf.quantize(
        model,
        nncf.Dataset([image[None] for image in images]),
        subset_size=len(images),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER if kind == "vit" else None,
    )
    return found


def opened(model: ov.Model, spec: PreprocessSpec, precision: Any) -> Callable[..., Embeddings]:
    return OpenVinoEncoder(
        model, name="model", fingerprint="", preprocess=spec, precision=precision
    ).encode


def compare(arms: dict[str, Any], images: NDArray[np.uint8]) -> None:
    # quantized, the graph's own rows are not of unit length
    rows = {name: unit_rows(encode(images)) for name, encode in arms.items()}
    exact = rows["fp32"]
    centers = unit_rows(np.random.default_rng(1).standard_normal((CENTERS, exact.shape[1])))
    others = (exact @ exact.T)[~np.eye(len(exact), dtype=bool)]
    print(f"cosine between different images: mean {others.mean():.4f}, least {others.min():.4f}")
    for name, found in rows.items():
        cosines = (found * exact).sum(axis=1)
        labels = np.mean((found @ centers.T).argmax(1) == (exact @ centers.T).argmax(1))
        alike = np.mean(nearest_others(found) == nearest_others(exact))
        print(
            f"{name}: cosine to fp32 mean {cosines.mean():.5f}, least {cosines.min():.5f};"
            f" same nearest center {labels:.0%}, same nearest image {alike:.0%}"
        )


def nearest_others(rows: Embeddings) -> NDArray[np.intp]:
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    nearest: NDArray[np.intp] = cosines.argmax(axis=1)
    return nearest


def measure(arms: dict[str, Any], batch: NDArray[np.uint8], rounds: int) -> None:
    figures = Figures()
    for _ in range(rounds):
        for name, encode in arms.items():
            used_before, started = time.process_time(), time.perf_counter()
            encode(batch)
            spent = time.perf_counter() - started
            figures.add(f"{name} rate", len(batch) / spent)
            used = time.process_time() - used_before
            figures.add(f"{name} cpu", 1000 * used / len(batch))
    for name in arms:
        rate, cpu = figures.show(f"{name} rate", "images/s"), figures.show(f"{name} cpu", "ms")
        print(f"{name}: {rate}, {cpu} of CPU an image")
    for name in arms:
        if name != "int8":
            print(f"int8 / {name}, images/s {figures.ratio('int8 rate', f'{name} rate')}")
            print(f"{name} / int8, CPU      {figures.ratio(f'{name} cpu', 'int8 cpu')}")


if __name__ == "__main__":
    main()
