"""Ten minutes of mixed load on a real server: what grows is found.

SOAK_SECONDS gives another length, SOAK_PROCESSES several server processes; both are this test's own.
"""

import io
import itertools
import os
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.integration.bodies import data_uri, files
from tests.integration.running import children, serving, until

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
PROCESSES = int(os.environ.get("SOAK_PROCESSES", "1"))
CLIENTS = 6
WARM_UP = 0.25  # of the time
MOST_MIB = 100
IDLE_S = 11  # the framework's threads, which write large uploads to files, may wait ten seconds for the next one


def picture(width, height, kind, *, seed):
    small = np.random.default_rng(seed).integers(
        0, 255, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(small).resize((width, height)).save(buffer, kind)
    return buffer.getvalue()


def pictures():
    """Of sizes from a point to twelve megapixels, as JPEG, PNG and WebP."""
    sides = [
        (1, 1),
        (8, 8),
        (500, 375),
        (375, 500),
        (640, 480),
        (1024, 768),
        (2000, 1500),
        (4000, 3000),
        (3000, 40),
    ]
    kinds = itertools.cycle(("JPEG", "PNG", "WEBP", "JPEG"))
    return [picture(*side, next(kinds), seed=seed) for seed, side in enumerate(sides * 3)]


class Load:
    """One client: a request of some kind after the other, until told to stop."""

    def __init__(self, url, port, images, nasty, seed):
        self.url, self.port, self.images, self.nasty = url, port, images, nasty
        self.random = random.Random(seed)
        self.statuses = Counter()
        self.broken = []

    def run(self, stop):
        kinds = [
            self.one,
            self.one,
            self.batch,
            self.batch,
            self.openai,
            self.labels,
            self.bad,
            self.wrong,
            self.leave,
        ]
        while not stop.is_set():
            with httpx.Client(base_url=self.url, timeout=60) as client:
                for _ in range(self.random.randrange(1, 20)):
                    if not stop.is_set():
                        self.note(self.random.choice(kinds)(client))

    def note(self, answer):
        if answer is not None:
            self.statuses[answer.status_code] += 1
            if answer.status_code >= 500:
                self.broken.append((answer.status_code, answer.text[:300]))

    def fresh(self):
        """One that no cache has, in half of the cases."""
        image = self.random.choice(self.images)
        return image + self.random.randbytes(8) if self.random.random() < 0.5 else image

    def one(self, client):
        return client.post(
            "/v1/images/embed", content=self.fresh(), headers={"Content-Type": "image/jpeg"}
        )

    def batch(self, client):
        return client.post(
            "/v1/images/embed",
            files=files(*[self.fresh() for _ in range(self.random.randrange(1, 9))]),
        )

    def openai(self, client):
        model = client.get("/v1/models").json()["data"][0]["id"]
        return client.post(
            "/v1/embeddings", json={"model": model, "input": [data_uri(self.fresh())]}
        )

    def labels(self, client):
        return client.post(
            f"/v1/labels?top={self.random.randrange(1, 13)}", files=files(self.fresh())
        )

    def bad(self, client):
        return client.post(
            "/v1/images/embed", files=files(self.random.choice(self.nasty), self.fresh()[:-200])
        )

    def wrong(self, client):
        return self.random.choice(
            [
                lambda: client.post("/v1/labels", json={"embeddings": [["x"]]}),
                lambda: client.get(f"/nowhere/{self.random.random()}"),
                lambda: client.post("/v1/embeddings", content=b"{"),
                lambda: client.get("/metrics"),
                lambda: client.get("/health/ready"),
            ]
        )()

    def leave(self, client):
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            body = self.fresh()
            head = f"POST /v1/images/embed HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body[: self.random.randrange(len(body))])


def family(pid):
    return [pid, *(member for child in children(pid) for member in family(child))]


def memory_mib(pids):
    """Of all processes, what they share counted once."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) for text in texts) / 1024


def count(pids, what):
    return {pid: len(list(Path(f"/proc/{pid}/{what}").iterdir())) for pid in pids}


class Soak:
    def __init__(self, server, images, nasty):
        self.server = server
        self.loads = [Load(server.url, server.port, images, nasty, seed) for seed in range(CLIENTS)]

    def load(self, seconds):
        """Memory at every second of it, in MiB."""
        stop, seen = threading.Event(), []
        threads = [threading.Thread(target=load.run, args=(stop,)) for load in self.loads]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(1)
            seen.append(memory_mib(family(self.server.process.pid)))
        stop.set()
        for thread in threads:
            thread.join()
        return seen

    def at_rest(self):
        """Threads and open files of every process, when nobody asks anything."""
        until(lambda: self.server.metric('mlcd_held{of="bytes"}') == 0, 30)
        time.sleep(IDLE_S)
        large = picture(
            4000, 3000, "PNG", seed=0
        )  # goes to a file, by such a thread: the others end then
        for _ in range(
            1 if PROCESSES == 1 else 8 * PROCESSES
        ):  # who takes a connection is not ours to say
            httpx.post(f"{self.server.url}/v1/images/embed", files=files(large), timeout=60)
        time.sleep(1)
        pids = family(self.server.process.pid)
        return count(pids, "task"), count(pids, "fd")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_nothing_grows(journey, shared_data):
    nasty = [
        path.read_bytes()
        for path in sorted((shared_data / "nasty_images").rglob("*"))
        if path.is_file()
    ]
    with serving(journey / "model", processes=PROCESSES, log__level="warning") as server:
        until(lambda: server.metric("mlcd_processes") == PROCESSES, 60, server)
        soak = Soak(server, pictures(), [image for image in nasty if len(image) < 2**22])
        soak.load(SECONDS * WARM_UP)
        before = soak.at_rest()
        seen = soak.load(SECONDS * (1 - WARM_UP))
        after = soak.at_rest()
        statuses = sum((load.statuses for load in soak.loads), Counter())
        first, last = np.median(seen[: len(seen) // 4]), np.median(seen[-len(seen) // 4 :])
        sys.stdout.write(
            f"{SECONDS:.0f} s, answers {dict(statuses)}: {first:.0f} to {last:.0f} MiB (most {max(seen):.0f}),"
            f" threads and files {[sum(of.values()) for of in before]} to {[sum(of.values()) for of in after]}\n"
        )
        assert [broken for load in soak.loads for broken in load.broken] == []
        assert statuses[200] > SECONDS
        assert last - first < MOST_MIB
        assert after == before
