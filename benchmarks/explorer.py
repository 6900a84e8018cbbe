"""The explorer in a real browser without a GPU: the wall, and the map of many items.

    python benchmarks/explorer.py [--photographs FOLDER] [--items 100000 1000000]

It prints how long after its load the wall of a collection of these photographs is seen (hog's
clusters, every picture in sight decoded), the first points of the map, all of its points, frames a
second while it is panned by a hand that never rests, and the memory of the page. The map's items
are synthetic, in a collection of the fake engine. Chromium draws in software (SwiftShader) here;
with a GPU all of it is faster.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import numpy as np

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.types import unit_rows
from service.inference.engine.fake import FakeEncoder
from tests.browser.chromium import Page, browsing
from tests.integration.running import serving

MODEL: Final = "fake:dimension=16"
KINDS: Final = 100
RECALL: Final = 0.8
ADDED_AT_ONCE: Final = 8192
PAN_S: Final = 5
ROUNDS: Final = 5
WALL: Final = """
(all => all.length > 0 && all.every(e => e.complete && e.naturalWidth))(
  [...document.querySelectorAll('.wall img')]
    .filter(e => e.getBoundingClientRect().top < innerHeight))
&& performance.now()"""
DRAWN: Final = "+(document.querySelector('.chart')?.dataset.drawn ?? 0)"
# Every frame is counted, with what was drawn in it.
PAN: Final = f"""
new Promise(done => {{
  const chart = document.querySelector('.chart');
  const {{x, y, width, height}} = chart.getBoundingClientRect();
  const hand = (kind, angle) => chart.dispatchEvent(new PointerEvent(kind, {{
    pointerId: 1, clientX: x + width * (0.5 + 0.2 * Math.sin(angle)),
    clientY: y + height * (0.5 + 0.2 * Math.cos(1.3 * angle)), bubbles: true}}));
  chart.setPointerCapture = () => undefined;  // no pointer of the system is down
  const frames = [], end = performance.now() + {1000 * PAN_S};
  hand('pointerdown', 0);
  const move = now => {{
    frames.push([now, +chart.dataset.drawn]);
    if (now > end) {{ hand('pointerup', now / 300); done(frames); return; }}
    hand('pointermove', now / 300);
    requestAnimationFrame(move);
  }};
  requestAnimationFrame(move);
}})"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photographs", type=Path, help="A folder; without it there is no wall.")
    parser.add_argument("--items", type=int, nargs="*", default=[100_000, 1_000_000])
    options = parser.parse_args()
    if options.photographs is not None:
        measure_wall(options.photographs)
    for num in options.items:
        measure_map(num)


def measure_wall(photographs: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mlcd("embed", photographs, folder / "embeddings", "--model", "hog")
        mlcd("cluster", folder / "embeddings", folder / "centers", "--clusters", 20, "--names")
        with serving("hog", centers=folder / "centers", state_dir=folder / "state") as server:
            num = add_photographs(server.url, photographs)
            seen = []
            for _ in range(ROUNDS):
                with opened() as page:  # its cache is empty
                    page.open(f"{server.url}/")
                    seen.append(page.until(WALL) / 1000)
    print(
        f"wall of {num} photographs: seen {statistics.median(seen):.2f} s after the address was"
        f" given (of {ROUNDS}: {min(seen):.2f} to {max(seen):.2f})"
    )


def measure_map(num: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        state = Path(name)
        add_synthetic(state / "collections", num)
        with serving(MODEL, engine="fake", state_dir=state) as server, opened() as page:
            # The layout is made when it is first asked for; the page is measured, not that.
            asked = f"{server.url}/v1/collections/synthetic/layout"
            httpx.get(asked, timeout=600).raise_for_status()
            httpx.get(f"{asked}/values?by=metadata.kind", timeout=600).raise_for_status()
            httpx.get(f"{asked}/legend?by=metadata.kind", timeout=600).raise_for_status()
            page.open(f"{server.url}/#/map")
            first = page.until(f"{DRAWN} > 0 && performance.now()") / 1000
            every = page.until(f"{DRAWN} == {num} && performance.now()") / 1000
            frames = page.value(PAN)
            still = page.value("performance.now()")
            settled = page.until(f"{DRAWN} == {num} && performance.now()") - still
            memory = memory_mib(page.process)
    times = np.diff([now for now, _ in frames])
    print(
        f"map of {num:,} items: first points after {first:.2f} s, all after {every:.2f} s;"
        f" panning {1000 / times.mean():.1f} frames/s (95 % within {np.quantile(times, 0.95):.0f}"
        f" ms), {statistics.median(drawn for _, drawn in frames):,.0f} points each, all"
        f" {settled / 1000:.2f} s after it rests; memory of the page {memory:.0f} MiB"
    )


@contextmanager
def opened() -> Iterator[Page]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("chromium is not installed")
    with tempfile.TemporaryDirectory() as folder, browsing(program, Path(folder)) as page:
        page.resize(1280, 860)
        yield page


def mlcd(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "mlcd", *map(str, arguments)], check=True)


def add_photographs(url: str, photographs: Path) -> int:
    paths = sorted(path for path in photographs.rglob("*.jpg"))
    with httpx.Client(base_url=url, timeout=60) as client:
        client.put("/v1/collections/photographs").raise_for_status()
        for start in range(0, len(paths), 32):
            some = paths[start : start + 32]
            ids = ", ".join(f'{{"id": "{path.relative_to(photographs)}"}}' for path in some)
            client.post(
                "/v1/collections/photographs/items",
                files=[("files", path.read_bytes()) for path in some],
                data={"items": f"[{ids}]"},
            ).raise_for_status()
    return len(paths)


def add_synthetic(folder: Path, num: int) -> None:
    """Makes a collection of clouds around random centers."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    encoder = FakeEncoder(MODEL)
    centers = random.standard_normal((KINDS, encoder.dimension), dtype=np.float32)
    with Collection.create(
        folder / "synthetic",
        fingerprint=encoder.fingerprint,
        dimension=encoder.dimension,
        recall=RECALL,
        background=False,
    ) as collection:
        for start in range(0, num, ADDED_AT_ONCE):
            kinds = random.integers(KINDS, size=min(ADDED_AT_ONCE, num - start))
            noise = random.standard_normal((len(kinds), encoder.dimension), dtype=np.float32)
            rows = unit_rows(centers[kinds] + 0.5 * noise)
            collection.add(
                [
                    Item(f"{start + row}.jpg", rows[row], {"kind": f"kind {kind}"})
                    for row, kind in enumerate(kinds)
                ]
            )
        # Otherwise the server would make the index beside what is measured.
        collection.reindex()


def memory_mib(process: int) -> float:
    """Returns the memory of the page's own process, the largest renderer below the browser."""
    found = 0
    for pid in descendants(process):
        folder = Path(f"/proc/{pid}")
        if b"--type=renderer" in (folder / "cmdline").read_bytes():
            lines = (folder / "smaps_rollup").read_text().splitlines()
            found = max(found, *(int(line.split()[1]) for line in lines if line[:4] == "Pss:"))
    return found / 1024


def descendants(process: int) -> list[int]:
    children = [
        int(pid)
        for path in Path(f"/proc/{process}/task").glob("*/children")
        for pid in path.read_text().split()
    ]
    return [*children, *(pid for child in children for pid in descendants(child))]


if __name__ == "__main__":
    main()
