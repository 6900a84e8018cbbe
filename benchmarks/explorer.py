"""The front door and the map in a real browser, without a GPU.

    python benchmarks/explorer.py [--photographs FOLDER] [--items 100000 1000000]

With photographs it installs this checkout's wheel with the extras `serve` and `starter` into an
environment of its own, runs `mlcd explore` on a copy of the folder in fresh states, and prints
when its page shows the first picture, the wall of groups and their names, how long words take to
their first hit, and the same for a second start, for one after ten new and three deleted files, and
for the run after kill -9 in each stage. The browser is open when the command is entered. Of the map
it prints the first points, all points, frames a second while a hand pans without rest, and the
memory of the page; its items are synthetic, in a collection of the fake engine. Chromium draws in
software (SwiftShader) here.
"""

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.service.inference.engine.fake import FakeEncoder
from mlcd.types import unit_rows
from tests.browser.chromium import Page, browsing
from tests.conftest import free_port
from tests.integration.running import serving

MODEL: Final = "fake:dimension=16"
KINDS: Final = 100
RECALL: Final = 0.8
ADDED_AT_ONCE: Final = 8192
PAN_S: Final = 5
EXPLORED: Final = 3  # times
ROOT: Final = Path(__file__).resolve().parents[1]
WORDS: Final = "a motorbike"
PICTURE: Final = (
    "[...document.querySelectorAll('main img')].some(e => e.complete && e.naturalWidth)"
)
NOW: Final = "fetch('v1/exploration').then(answer => answer.json())"
DONE: Final = f"{NOW}.then(now => now.stage === 'done')"
HIT: Final = "[...document.querySelectorAll('.tile img')].some(e => e.complete && e.naturalWidth)"
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
    parser.add_argument(
        "--photographs", type=Path, help="A folder; without it only the map is measured."
    )
    parser.add_argument("--items", type=int, nargs="*", default=[100_000, 1_000_000])
    options = parser.parse_args()
    if options.photographs is not None:
        measure_explore(options.photographs)
    for num in options.items:
        measure_map(num)


def measure_explore(photographs: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = install_wheel(folder)
        photos = folder / "photos"
        shutil.copytree(photographs, photos)
        firsts, seconds, changes = [], [], []
        for number in range(EXPLORED):
            # nothing is known of the pictures, nor of the model's words
            run = (python, photos, folder / f"state-{number}", folder / f"cache-{number}")
            with opened() as page, exploring(*run) as (clock, url):
                firsts.append(drive(page, url, clock))
            with opened() as page, exploring(*run) as (clock, url):
                seconds.append(time_until(page, url, clock, WALL))
            with changed(photos), opened() as page, exploring(*run) as (clock, url):
                changes.append(time_until(page, url, clock, DONE))
            print(f"run {number}: {firsts[-1]}, again {seconds[-1]:.1f}", flush=True)
        for what in firsts[0]:
            print(f"{what}: {spread([times[what] for times in firsts])}")
        print(f"second start to the wall: {spread(seconds)}")
        print(f"ten files more and three fewer, all done: {spread(changes)}")
        for stage in ("embed", "cluster", "name", "label"):
            run = (python, photos, folder / f"killed-in-{stage}", folder / "cache-0")
            kill_in(stage, *run)
            with opened() as page, exploring(*run) as (clock, url):
                seconds_again = time_until(page, url, clock, DONE)
                num = read_status(url)["pictures"]
            print(f"after kill -9 in {stage}: done in {seconds_again:.1f} s, {num} pictures")


def install_wheel(folder: Path) -> Path:
    """Returns the interpreter of a new environment that has the wheel of this checkout."""
    code = f"from hatchling.build import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    wanted = f"mlcd[serve,starter] @ {wheel.as_uri()}"
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, wanted], check=True)
    return python


def start(
    python: Path, photos: Path, state: Path, cache: Path
) -> tuple["subprocess.Popen[bytes]", str]:
    """Starts `mlcd explore`, and returns its process and its address."""
    port = free_port()
    command = ["env", f"XDG_CACHE_HOME={cache}", str(python), "-m", "mlcd", "explore", str(photos)]
    command += ["--state", str(state), "--port", str(port), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return process, f"http://127.0.0.1:{port}"


@contextmanager
def exploring(
    python: Path, photos: Path, state: Path, cache: Path
) -> Iterator[tuple[Callable[[], float], str]]:
    """Runs `mlcd explore` and ends it as Ctrl-C does. Yields a clock that began when it was
    entered, and its address.
    """
    began = time.monotonic()
    process, url = start(python, photos, state, cache)
    try:
        yield lambda: time.monotonic() - began, url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def drive(page: Page, url: str, clock: Callable[[], float]) -> dict[str, float]:
    """Returns the seconds from Enter to each thing that the page shows, and those of a search."""
    open_when_up(page, url)
    times = {}
    for what, shown in (("first picture", PICTURE), ("wall", WALL), ("names", DONE)):
        page.until(shown)
        times[what] = clock()
    asked = time.monotonic()
    page.open(f"{url}/#/search?text={WORDS}")
    page.until(HIT)
    return times | {"words to their first hit": time.monotonic() - asked}


def time_until(page: Page, url: str, clock: Callable[[], float], shown: str) -> float:
    open_when_up(page, url)
    page.until(shown)
    return clock()


def open_when_up(page: Page, url: str) -> None:
    while read_status(url)["stage"] is None:
        time.sleep(0.02)
    page.open(f"{url}/")


@contextmanager
def changed(photos: Path) -> Iterator[None]:
    """Ten more files and three fewer, for a while."""
    some = sorted(photos.rglob("*.jpg"))
    more = [path.with_name(f"more-{number}.jpg") for number, path in enumerate(some[:10])]
    for path, source in zip(more, some[100:110], strict=True):
        shutil.copy(source, path)
    fewer = {path: path.read_bytes() for path in some[200:203]}
    for path in fewer:
        path.unlink()
    yield
    for path in more:
        path.unlink()
    for path, content in fewer.items():
        path.write_bytes(content)


def kill_in(stage: str, python: Path, photos: Path, state: Path, cache: Path) -> None:
    """Kills a run as soon as it has come to this stage."""
    process, url = start(python, photos, state, cache)
    while (now := read_status(url))["stage"] != stage or not now["pictures"]:
        if process.poll() is not None or now["stage"] == "done":
            sys.exit(f"the stage {stage} was never seen")
        time.sleep(0.02)
    process.kill()
    process.wait()


def read_status(url: str) -> dict[str, Any]:
    try:
        status: dict[str, Any] = httpx.get(f"{url}/v1/exploration").json()
    except httpx.TransportError:
        return {"stage": None}
    return status


def spread(values: list[float]) -> str:
    middle = statistics.median(values)
    return f"{middle:.1f} s (of {len(values)}: {min(values):.1f} to {max(values):.1f})"


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
    profile = tempfile.TemporaryDirectory(
        ignore_cleanup_errors=True
    )  # Chromium ends after its parent
    with profile as folder, browsing(program, Path(folder)) as page:
        page.resize(1280, 860)
        yield page


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
