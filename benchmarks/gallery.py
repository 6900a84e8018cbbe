"""The cost of thumbnails where items are added, and the time of a page of a cluster's members.

    python benchmarks/gallery.py IMAGES [--model b32] [--rounds 6] [--batch 32] [--num 256]

Two servers of the same model run, one with thumbnails and one without. Their rounds take turns, and
begin with the other one each time. A round adds every image under a new id, after its bytes were
changed so that no cache knows it; the ratio is the median of the rounds', with the least and the
greatest. The CPU time is that of server and engine, which a busy machine changes less.

Then 100,000 synthetic items around few centers, one of which has 20,000 members, are a collection:
times of pages of 60 members, of the list of centers, of the layout and of thumbnails.
"""

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from overload import Server, serving
from PIL import Image
from serve import make_model

from mlcd.artifacts.centers import Centers
from mlcd.artifacts.draft import Draft
from mlcd.artifacts.manifest import Request
from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.images.sources import open_source
from mlcd.types import unit_rows

ITEMS: Final = 100_000
MEMBERS: Final = 20_000
CENTERS: Final = 200
PAGES: Final = 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images")
    parser.add_argument("--model", default="b32", help="b32: a ViT-B/32 with random weights")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--num", type=int, default=256)
    options = parser.parse_args()
    source = open_source(options.images)
    entries = list(source.entries)[: options.num]
    images = [source.read(entry) for entry in entries]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model == "b32":
            make_model(Path(folder) / "b32")
            model = str(Path(folder) / "b32" / "model")
        print(json.dumps(adding(Path(folder), model, images, options), indent=2), flush=True)
        print(json.dumps(browsing(Path(folder), model), indent=2))


def adding(
    folder: Path, model: str, images: list[bytes], options: argparse.Namespace
) -> dict[str, Any]:
    """Returns images per second with thumbnails and without, and the ratio."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    settings = {
        arm: {
            "MLCD_STATE_DIR": str(folder / arm),
            "MLCD_THUMBNAILS__ENABLED": str(arm == "on").lower(),
        }
        for arm in rates
    }
    with (
        serving(model, settings["on"]) as on,
        serving(model, settings["off"]) as off,
        httpx.Client(timeout=120) as client,
    ):
        urls = {"on": f"{on.url}/v1/collections/c", "off": f"{off.url}/v1/collections/c"}
        for url in urls.values():
            client.put(url).raise_for_status()
            add(client, url, images[: options.batch], -1, options.batch)
        before = {"on": cpu_seconds(on), "off": cpu_seconds(off)}
        for number in range(options.rounds):
            arms = ("on", "off") if number % 2 else ("off", "on")
            for arm in arms:
                began = time.perf_counter()
                add(client, urls[arm], images, number, options.batch)
                rates[arm].append(len(images) / (time.perf_counter() - began))
        stored = client.get(urls["on"]).json()["thumbnails"]
        cpu_s = {"on": cpu_seconds(on) - before["on"], "off": cpu_seconds(off) - before["off"]}
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "images": len(images),
        "on_images_per_s": round(statistics.median(rates["on"]), 1),
        "off_images_per_s": round(statistics.median(rates["off"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        "cpu_ms_per_image": {
            arm: round(1000 * seconds / (options.rounds * len(images)), 1)
            for arm, seconds in cpu_s.items()
        },
        "bytes_per_thumbnail": round(stored["bytes"] / stored["pictures"]),
    }


def cpu_seconds(server: Server) -> float:
    """Returns the CPU time of a server and its engine, which other processes do not change."""
    pid = server.process.pid
    pids = [str(pid)]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        pids += tasks.read_text().split()
    ticks = 0
    for each in pids:
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def add(client: httpx.Client, url: str, images: list[bytes], number: int, batch: int) -> None:
    for start in range(0, len(images), batch):
        # bytes behind the end of a picture change its digest and nothing else
        part = [image + f"{number}".encode() for image in images[start : start + batch]]
        items = [{"id": f"{number}/{start + n}"} for n in range(len(part))]
        files = [("files", (str(n), image)) for n, image in enumerate(part)]
        answer = client.post(f"{url}/items", files=files, data={"items": json.dumps(items)})
        answer.raise_for_status()
        assert not answer.json()["errors"], answer.json()["errors"]


def browsing(folder: Path, model: str) -> dict[str, Any]:
    """Returns milliseconds of pages of the large cluster and of other reads, p50 and p99."""
    state = folder / "browsing"
    with serving(model, {"MLCD_STATE_DIR": str(state)}) as server:
        info = httpx.get(f"{server.url}/v1/info").json()
    fingerprint, dimension = info["fingerprint"], info["dimension"]
    vectors = synthetic(dimension)
    write_collection(state / "collections" / "c", fingerprint, vectors)
    write_centers(folder / "centers", fingerprint, dimension)
    settings = {"MLCD_STATE_DIR": str(state), "MLCD_CENTERS": str(folder / "centers")}
    with (
        serving(model, settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        named = {"collection": "c"}
        first = timed(client, "/v1/centers", named)
        largest = client.get("/v1/centers", params=named).json()["centers"][0]
        path, cursor, pages = f"/v1/centers/{largest['id']}/members", None, []
        for _ in range(PAGES):
            params = {**named, **({"cursor": cursor} if cursor else {})}
            began = time.perf_counter()
            page = client.get(path, params=params).json()
            pages.append(time.perf_counter() - began)
            cursor = page["next"]
        wall = [timed(client, "/v1/centers", named) for _ in range(50)]
        layout = timed(client, "/v1/collections/c/layout", {})
        again = [timed(client, "/v1/collections/c/layout", {}) for _ in range(10)]
        pictures = [timed(client, f"/v1/collections/c/items/{n}/thumbnail", {}) for n in range(100)]
    return {
        "items": ITEMS,
        "members": largest["members"],
        "centers_first_ms": round(1000 * first),
        "members_page_ms": percentiles(pages),
        "centers_page_ms": percentiles(wall),
        "layout_first_ms": round(1000 * layout),
        "layout_again_ms": percentiles(again),
        "thumbnail_ms": percentiles(pictures),
    }


def timed(client: httpx.Client, path: str, params: dict[str, str]) -> float:
    began = time.perf_counter()
    client.get(path, params=params).raise_for_status()
    return time.perf_counter() - began


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {
        f"p{share}": round(1000 * float(np.percentile(seconds, share)), 1) for share in (50, 99)
    }


def centers_of(dimension: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return unit_rows(np.random.default_rng(0).standard_normal((CENTERS, dimension)))


def synthetic(dimension: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns unit rows of which MEMBERS are near the first center, the others near any other."""
    random = np.random.default_rng(1)
    near = np.where(np.arange(ITEMS) < MEMBERS, 0, random.integers(1, CENTERS, ITEMS))
    noise = random.standard_normal((ITEMS, dimension)) / np.sqrt(dimension)
    return unit_rows(centers_of(dimension)[near] + 0.3 * noise)


def write_collection(
    path: Path, fingerprint: str, vectors: np.ndarray[Any, np.dtype[np.float32]]
) -> None:
    from mlcd.images.thumbnail import thumbnail

    buffer = io.BytesIO()
    Image.new("RGB", (160, 120), "green").save(buffer, "PNG")
    picture = thumbnail(buffer.getvalue())
    with Collection.create(
        path, fingerprint=fingerprint, dimension=vectors.shape[1], background=False
    ) as collection:
        for start in range(0, len(vectors), 8192):
            collection.add(
                [
                    Item(str(n), vector, {"n": n % 7}, picture)
                    for n, vector in enumerate(vectors[start : start + 8192], start)
                ]
            )


def write_centers(path: Path, fingerprint: str, dimension: int) -> None:
    centers = Centers(
        centers_of(dimension), np.full(CENTERS, ITEMS // CENTERS, np.int64), fingerprint
    )
    with Draft(path, Request("centers", {}, (), fingerprint)) as draft:
        centers.write(draft)
        draft.publish()


if __name__ == "__main__":
    main()
