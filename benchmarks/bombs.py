"""Measures how long one key's client waits while another key sends bombs: small files of 89 million pixels each.

A real server with two keys and a fake engine, so that decoding alone is measured. First the one client by itself, then
beside as many clients as --bombs, each of which sends the next bomb when it has an answer.

    python benchmarks/bombs.py --seconds 20 --bombs 22 --rate 600
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from PIL import Image

PORT: Final = 8971
URL: Final = f"http://127.0.0.1:{PORT}"
SIDE: Final = 9459  # squared, the default of MLCD_LIMITS__MAX_PIXELS
MODEL: Final = "fake:latency_ms=5"


def picture(side: int, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (200, 30, 30)).save(buffer, kind, **options)
    return buffer.getvalue()


def new_key(folder: Path, name: str, rate: int) -> str:
    command = [
        sys.executable,
        "-m",
        "mlcd",
        "keys",
        "create",
        name,
        "--file",
        str(folder / "keys.json"),
    ]
    more = ["--scope", "embed", *(["--rate", str(rate)] if rate else [])]
    return subprocess.run(
        [*command, *more], check=True, capture_output=True, text=True
    ).stdout.split()[-1]


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    given = {
        "MLCD_AUTH__KEYS_FILE": str(folder / "keys.json"),
        "MLCD_CACHE__MEMORY_BYTES": "0",
        "MLCD_ENGINE": "fake",
    }
    arguments = ["serve", "--model", MODEL, "--port", str(PORT)]
    environment = {**os.environ, **given}  # noqa: TID251 - a child's
    server = subprocess.Popen(
        [sys.executable, "-m", "mlcd", *arguments], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        while not _ready():
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


def _ready() -> bool:
    try:
        return httpx.get(f"{URL}/health/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def ask_on(key: str, image: bytes, kind: str, until: float) -> tuple[Counter[int], list[float]]:
    """Statuses, and the seconds of each answer that is an embedding."""
    statuses: Counter[int] = Counter()
    seconds: list[float] = []
    headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
    with httpx.Client(base_url=URL, headers=headers, timeout=60) as client:
        while time.monotonic() < until:
            started = time.perf_counter()
            status = client.post("/v1/images/embed", content=image).status_code
            statuses[status] += 1
            if status == httpx.codes.OK:
                seconds.append(time.perf_counter() - started)
            else:
                time.sleep(0.2)
    return statuses, seconds


def beside(num_bombs: int, bomber: str, client: str, seconds: float) -> dict[str, object]:
    bomb, small = picture(SIDE, "WEBP", lossless=True, quality=0, method=0), picture(500, "JPEG")
    until, bombed = time.monotonic() + seconds, Counter[int]()
    threads = [
        threading.Thread(target=lambda: bombed.update(ask_on(bomber, bomb, "image/webp", until)[0]))
        for _ in range(num_bombs)
    ]
    for thread in threads:
        thread.start()
    time.sleep(min(1.0, num_bombs))
    statuses, waits = ask_on(client, small, "image/jpeg", until)
    for thread in threads:
        thread.join()
    p50, p99 = np.percentile(waits, [50, 99]) if waits else (float("nan"), float("nan"))
    return {
        "bombs": num_bombs,
        "p50_s": round(p50, 3),
        "p99_s": round(p99, 3),
        "statuses": statuses,
        "bombed": bombed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--bombs", type=int, default=22)
    parser.add_argument(
        "--rate", type=int, default=0, help="Images a minute of the bombing key; 0: no rate."
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bomber, client = new_key(folder, "bomber", given.rate), new_key(folder, "client", 0)
        with serving(folder):
            for num_bombs in (0, given.bombs):
                print(json.dumps(beside(num_bombs, bomber, client, given.seconds)), flush=True)


if __name__ == "__main__":
    main()
