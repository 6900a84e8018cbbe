"""Does a search by a photograph find the photograph that it was made from? Over HTTP, among real images.

    python benchmarks/photographs.py IMAGES --model MODEL [--embeddings DIR] [--items 20000] [--queries 500]

The images become a collection that a server serves; some of them, drawn by hash, are resized, recompressed, cropped,
turned gray or mirrored, each with another copy, and sent as queries. Prints for each kind of copy how often the image
itself is the first match, and among the first ten, with Wilson's interval of 95 %, and what a request of 16 takes.
--embeddings: of IMAGES by MODEL, where `mlcd embed` has made them already.
"""

import argparse
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from overload import serving
from PIL import Image, ImageOps

from mlcd.artifacts.embeddings import EmbeddingsArtifact
from mlcd.images.sources import open_source
from mlcd.randomness import hash_counters

TOP: Final = 10
BATCH: Final = 16
_NORMAL_95: Final = 1.959963984540054


def cropped(image: Image.Image, share: float) -> Image.Image:
    """The middle, of this share of each side."""
    width, height = image.size
    left, upper = round(width * (1 - share) / 2), round(height * (1 - share) / 2)
    return image.crop((left, upper, width - left, height - upper))


def resized(image: Image.Image, factor: float) -> Image.Image:
    return image.resize(
        (round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC
    )


COPIES: Final[dict[str, tuple[Callable[[Image.Image], Image.Image], int]]] = {
    "as it is, JPEG 95": (lambda image: image, 95),
    "JPEG 50": (lambda image: image, 50),
    "JPEG 20": (lambda image: image, 20),
    "twice the size, JPEG 90": (lambda image: resized(image, 2), 90),
    "half the size, JPEG 90": (lambda image: resized(image, 0.5), 90),
    "middle 90 %, JPEG 90": (lambda image: cropped(image, 0.9), 90),
    "middle 75 %, JPEG 90": (lambda image: cropped(image, 0.75), 90),
    "half the size, middle 90 %, JPEG 50": (lambda image: resized(cropped(image, 0.9), 0.5), 50),
    "gray, JPEG 90": (ImageOps.grayscale, 90),
    "mirrored, JPEG 90": (ImageOps.mirror, 90),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images")
    parser.add_argument("--model", required=True)
    parser.add_argument("--embeddings", type=Path)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(
            Path(folder),
            options.images,
            options.model,
            options.embeddings,
            options.items,
            options.queries,
        )


def run(
    folder: Path, images: str, model: str, embeddings: Path | None, num_items: int, num_queries: int
) -> None:
    if embeddings is None:
        embeddings = folder / "embeddings"
        mlcd("embed", images, embeddings, "--model", model)
    stored = EmbeddingsArtifact.open(embeddings)
    settings = {"MLCD_STATE_DIR": str(folder / "state"), "MLCD_LOG__LEVEL": "warning"}
    with (
        serving(model, settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        path = "/v1/collections/photographs"
        client.put(path).raise_for_status()
        kept = chosen(len(stored.keys), num_items)
        add(client, path, stored, kept)
        described = client.get(path).json()
        print(
            f"{described['items']} images, index {described['index']['kind']}, {described['dimension']} dimensions"
        )
        source = open_source(images)
        entry_of = {entry.key: entry for entry in source.entries}
        keys = [stored.keys[row] for row in kept[chosen(len(kept), num_queries)]]
        originals = [
            Image.open(io.BytesIO(source.read(entry_of[key]))).convert("RGB") for key in keys
        ]
        for name, (change, quality) in COPIES.items():
            show(client, path, name, keys, [encoded(change(image), quality) for image in originals])


def add(client: httpx.Client, path: str, stored: EmbeddingsArtifact, kept: np.ndarray) -> None:
    rows, started = stored.load(), time.perf_counter()
    for start in range(0, len(kept), 64):
        items = [
            {"id": stored.keys[row], "embedding": rows[row].tolist()}
            for row in kept[start : start + 64]
        ]
        answer = client.post(f"{path}/items", json={"items": items}).raise_for_status().json()
        assert not answer["errors"]
    taken = time.perf_counter() - started
    print(f"added as JSON, 64 at once by one client: {len(kept) / taken:,.0f} items/s", flush=True)


def show(client: httpx.Client, path: str, name: str, keys: list[str], copies: list[bytes]) -> None:
    first = among = 0
    times = []
    for start in range(0, len(keys), BATCH):
        files = [("files", copy) for copy in copies[start : start + BATCH]]
        began = time.perf_counter()
        results = (
            client.post(f"{path}/search?top={TOP}", files=files)
            .raise_for_status()
            .json()["results"]
        )
        times.append(time.perf_counter() - began)
        for key, result in zip(keys[start : start + BATCH], results, strict=True):
            found = [match["id"] for match in result["matches"]]
            first, among = first + (found[0] == key), among + (key in found)
    p50 = np.median(times) * 1000
    print(
        f"{name}: first {told(first, len(keys))}, top {TOP} {told(among, len(keys))}, p50 {p50:.0f} ms",
        flush=True,
    )


def told(hits: int, num: int) -> str:
    """With Wilson's interval."""
    share, z2 = hits / num, _NORMAL_95**2
    center = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = _NORMAL_95 / (1 + z2 / num) * (share * (1 - share) / num + z2 / (4 * num**2)) ** 0.5
    return f"{share:.3f} ({max(0.0, center - half):.3f} to {min(1.0, center + half):.3f})"


def encoded(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def chosen(num: int, wanted: int) -> np.ndarray:
    """Of `num` rows, the same in every run."""
    return np.sort(np.argsort(hash_counters(np.arange(num)), kind="stable")[:wanted])


def mlcd(*arguments: object) -> None:
    command = [sys.executable, "-m", "mlcd", *map(str, arguments)]
    if status := subprocess.run(command, check=False).returncode:
        sys.exit(status)


if __name__ == "__main__":
    main()
