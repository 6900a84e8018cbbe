"""JPEG bytes to the encoder's square, in the modes exact and fast and by Pillow's draft().

    python benchmarks/decode.py [FOLDER] [--model MODEL.onnx] [--natural 200]
                                [--large 24] [--runs 5]

FOLDER contains photographs (default: ../shared/data/caltech101_20 if it exists, else the two of
scikit-learn). There are three sets: photographs as they are; the same upscaled to 12 megapixels;
and upscaled to anything from 1 to 12, so that every scale of the DCT occurs. All are encoded with
quality 90 in a temporary folder. draft() is the peer of fast.

One thread runs. Images per second are of its CPU time, hence per core, also on a busy machine. The
forms are interleaved; figures are the median of the runs, with minimum and maximum. With --model,
the preprocessing is the encoder's own, and the cosine of each image's embedding to that of its
exact pixels is printed: minimum, 1st percentile and mean.
"""

import argparse
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from mlcd.encoders import open_encoder
from mlcd.encoders.encoder import Encoder
from mlcd.encoders.options import EncoderOptions
from mlcd.images.transform import PreprocessSpec

DEFAULT_FOLDER = Path("../shared/data/caltech101_20")
BICUBIC = Image.Resampling.BICUBIC
Prepare = Callable[[bytes], NDArray[np.uint8]]


def forms(spec: PreprocessSpec) -> dict[str, Prepare]:
    return {
        "exact": spec.prepare,
        "fast": replace(spec, decode="fast").prepare,
        "draft": lambda data: drafted(data, spec),
    }


def drafted(data: bytes, spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Decodes as Pillow alone can: at 1/2, 1/4 or 1/8, with twice the target or more on the
    shortest side.
    """
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        _, box = image.draft("RGB", (2 * spec.resize_shortest,) * 2) or (None, None)
        shortest = min(width, height)
        size = (spec.resize_shortest * width // shortest, spec.resize_shortest * height // shortest)
        upright = ImageOps.exif_transpose(image.convert("RGB").resize(size, BICUBIC, box=box))
    left, top = ((side - spec.crop) // 2 for side in upright.size)
    return np.asarray(upright.crop((left, top, left + spec.crop, top + spec.crop))).transpose(
        2, 0, 1
    )


def photographs(folder: Path | None) -> Iterator[Image.Image]:
    """Yields RGB pictures again and again, in a shuffled order that is the same in every run."""
    if folder is None and not DEFAULT_FOLDER.is_dir():
        from sklearn.datasets import load_sample_images

        while True:
            yield from map(Image.fromarray, load_sample_images().images)
    paths = sorted((folder or DEFAULT_FOLDER).rglob("*.jpg"))
    random.Random(0).shuffle(paths)  # noqa: S311 - an order, no secret
    while paths:
        for path in paths:
            with Image.open(path) as image:
                yield image.convert("RGB")


def write_sets(out: Path, options: argparse.Namespace) -> dict[str, list[Path]]:
    draw = random.Random(1)  # noqa: S311 - sizes, no secret
    megapixels: dict[str, tuple[int, Callable[[], float | None]]] = {
        "as they are": (options.natural, lambda: None),
        "12 MP": (options.large, lambda: 12.0),
        "1 to 12 MP": (2 * options.large, lambda: draw.uniform(1, 12)),
    }
    sets: dict[str, list[Path]] = {}
    for name, (count, size) in megapixels.items():
        sets[name] = [out / f"{name} {number}.jpg" for number in range(count)]
        for path, picture in zip(sets[name], photographs(options.folder), strict=False):
            _upscaled(picture, size()).save(path, quality=90)
    return sets


def _upscaled(picture: Image.Image, megapixels: float | None) -> Image.Image:
    if megapixels is None:
        return picture
    scale = (megapixels * 1e6 / (picture.width * picture.height)) ** 0.5
    return picture.resize((round(scale * picture.width), round(scale * picture.height)), BICUBIC)


def measure(name: str, paths: Sequence[Path], spec: PreprocessSpec, num_runs: int) -> None:
    files = [path.read_bytes() for path in paths]
    rates: dict[str, list[float]] = {form: [] for form in forms(spec)}
    for _ in range(num_runs):
        for form, prepare in forms(spec).items():
            started = time.thread_time()
            for data in files:
                prepare(data)
            rates[form].append(len(files) / (time.thread_time() - started))
    print(f"\n{name}: {len(files)} images")
    for form, values in rates.items():
        ratio = statistics.median(
            ours / exact for ours, exact in zip(values, rates["exact"], strict=True)
        )
        print(
            f"  {form:6} {statistics.median(values):7.1f} images/s per core ({min(values):.1f} to "
            f"{max(values):.1f}),"
            f" {ratio:5.2f}x exact"
        )


def compare(paths: Sequence[Path], spec: PreprocessSpec, encoder: Encoder) -> None:
    cosines: dict[str, list[float]] = {"fast": [], "draft": []}
    for path in paths:
        data = path.read_bytes()
        rows = encoder.encode(np.stack([prepare(data) for prepare in forms(spec).values()]))
        for form, cosine in zip(cosines, rows[1:] @ rows[0], strict=True):
            cosines[form].append(float(cosine))
    for form, values in cosines.items():
        print(
            f"  {form:6} cosine to exact: minimum {min(values):.5f}, p1 "
            f"{np.percentile(values, 1):.5f},"
            f" mean {statistics.fmean(values):.5f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", help="an .onnx file with its JSON, or a model artifact")
    parser.add_argument("--natural", type=int, default=200)
    parser.add_argument("--large", type=int, default=24)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    encoder = open_encoder(options.model, EncoderOptions(num_threads=1)) if options.model else None
    spec = encoder.preprocess if encoder else PreprocessSpec(resize_shortest=224, crop=224)
    print(f"shortest side {spec.resize_shortest}, crop {spec.crop}")
    with tempfile.TemporaryDirectory() as out:
        for name, paths in write_sets(Path(out), options).items():
            measure(name, paths, spec, options.runs)
            if encoder:
                compare(paths, spec, encoder)


if __name__ == "__main__":
    main()
