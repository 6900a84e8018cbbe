"""Minutes of mixed load on a real server, with kills: what grows, breaks or differs is found.

SOAK_SECONDS gives another length, SOAK_PROCESSES several server processes; both are this test's
own.
"""

import contextlib
import io
import itertools
import json
import os
import random
import re
import signal
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

from tests.conftest import run_mlcd, start_mlcd
from tests.integration.bodies import data_uri, files
from tests.integration.running import children, serving, until

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
PROCESSES = int(os.environ.get("SOAK_PROCESSES", "1"))
CLIENTS = 6
KILLED_EVERY_S = 30  # a worker that starts and labels a part takes a third of it on two cores
WARM_UP = 0.25  # of the time
MOST_MIB = 100
# the framework's threads, which write large uploads to files, may wait ten seconds for the next one
IDLE_S = 11


def picture(width, height, kind, *, seed):
    small = np.random.default_rng(seed).integers(
        0, 255, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(small).resize((width, height)).save(buffer, kind)
    return buffer.getvalue()


def pictures():
    """Returns pictures from one pixel to twelve megapixels, as JPEG, PNG and WebP."""
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
            head = (
                "POST /v1/images/embed HTTP/1.1\r\nHost: x\r\nContent-Type: "
                f"image/png\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body[: self.random.randrange(len(body))])


def family(pid):
    return [pid, *(member for child in children(pid) for member in family(child))]


def memory_mib(pids):
    """Returns the memory of all processes; shared pages count once."""
    texts = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it was killed meanwhile
            texts.append(Path(f"/proc/{pid}/smaps_rollup").read_text())
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
def test_nothing_grows(journey, nasty):
    with serving(journey / "model", processes=PROCESSES, log__level="warning") as server:
        until(lambda: server.metric("mlcd_processes") == PROCESSES, 60, server)
        soak = Soak(server, pictures(), nasty)
        soak.load(SECONDS * WARM_UP)
        before = soak.at_rest()
        seen = soak.load(SECONDS * (1 - WARM_UP))
        after = soak.at_rest()
        statuses = sum((load.statuses for load in soak.loads), Counter())
        first, last = np.median(seen[: len(seen) // 4]), np.median(seen[-len(seen) // 4 :])
        sys.stdout.write(
            f"{SECONDS:.0f} s, answers {dict(statuses)}: {first:.0f} to {last:.0f} MiB (most "
            f"{max(seen):.0f}),"
            f" threads and files {[sum(of.values()) for of in before]} to "
            f"{[sum(of.values()) for of in after]}\n"
        )
        assert [broken for load in soak.loads for broken in load.broken] == []
        assert statuses[200] > SECONDS
        assert last - first < MOST_MIB
        assert after == before


@pytest.fixture
def nasty(shared_data):
    paths = sorted((shared_data / "nasty_images").rglob("*"))
    images = [path.read_bytes() for path in paths if path.is_file()]
    return [image for image in images if len(image) < 2**22]


class LoadOfAll(Load):
    """One client of every route of the schema, which also compares what must stay the same."""

    def __init__(self, *given, routes, words):
        super().__init__(*given)
        self.routes, self.words = routes, words
        self.known = {}

    def run(self, stop):
        kinds = [self.read] * 8 + [self.same] * 2 + [self.search, self.add, self.remove]
        kinds += [self.texts, self.classify, self.labels, self.openai, self.bad, self.leave]
        kinds += [self.duplicates]
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not stop.is_set():
                with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                    self.note(self.random.choice(kinds)(client))

    def note(self, answer):
        # an engine was killed, or what has a deadline was behind too much else
        if answer is not None and answer.status_code in (503, 504):
            self.statuses[answer.status_code] += 1
            assert answer.status_code == 504 or "retry-after" in answer.headers
            return
        super().note(answer)

    def read(self, client):
        return client.get(self.random.choice(self.routes))

    def same(self, client):
        """Asks for what was answered before, and notes an answer that differs."""
        number = self.random.randrange(len(self.images))
        answer = client.post("/v1/images/embed", files=files(self.images[number]))
        if answer.status_code == 200:
            vector = np.array(answer.json()["results"][0]["embedding"])
            if float(vector @ self.known.setdefault(number, vector)) < 1 - 1e-5:
                self.broken.append(("another embedding", number))
        return answer

    def search(self, client):
        body = self.random.choice([{"texts": [self.random.choice(self.words)]}, {"ids": ["p-0"]}])
        return client.post("/v1/collections/soak/search", json={"top": 20} | body)

    def add(self, client):
        some = [self.fresh() for _ in range(4)]
        ids = [{"id": f"p-{self.random.randrange(400)}", "metadata": {"n": 1}} for _ in some]
        data = {"items": json.dumps(ids)}
        return client.post("/v1/collections/soak/items", files=files(*some), data=data)

    def remove(self, client):
        return client.delete(f"/v1/collections/soak/items/p-{self.random.randrange(1, 400)}")

    def texts(self, client):
        return client.post("/v1/texts/embed", json={"texts": self.random.choices(self.words, k=5)})

    def duplicates(self, client):
        return client.post("/v1/collections/soak/duplicates", json={"similarity": 0.98})

    def classify(self, client):
        body = {"names": self.words, "images": [data_uri(self.fresh())]}
        return client.post("/v1/classify", json=body)


def routes_of(url):
    """Returns the path of every GET route, filled in with what is there, but those that stream."""
    schema = httpx.get(f"{url}/openapi.json").json()["paths"]
    values = {"collection": "soak", "name": "soak", "id": "p-0", "item": "p-0", "center": "0"}
    values |= {"field": "n", "by": "metadata.n", "job": "0" * 20}
    found = []
    for path, operations in schema.items():
        if "get" in operations and not path.endswith("/events"):
            filled = re.sub(r"{(\w+)(:path)?}", lambda match: values.get(match[1], "0"), path)
            needed = [
                f"{each['name']}={values.get(each['name'], '0')}"
                for each in operations["get"].get("parameters", [])
                if each["in"] == "query" and each.get("required")
            ]
            found.append(filled + ("?" + "&".join(needed) if needed else ""))
    return found


@contextlib.contextmanager
def killed_now_and_then(server, new_worker, stop):
    """Kills the engines of the server and the worker of jobs in turn, which others replace."""
    worker = [new_worker()]
    num = Counter()

    def kill():
        while not stop.wait(KILLED_EVERY_S):
            worker[0].kill()
            worker[0].communicate()
            worker[0] = new_worker()
            num["workers"] += 1
            if stop.wait(KILLED_EVERY_S):
                return
            if (engine := server.worker()) is not None:
                os.kill(engine, signal.SIGKILL)
                num["engines"] += 1

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield num
    finally:
        stop.set()
        thread.join()
        worker[0].terminate()
        worker[0].communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_under_kills_every_route_answers_the_same_and_every_job_ends(starter, nasty, tmp_path):
    images, root = pictures(), tmp_path / "root"
    (root / "photos").mkdir(parents=True)
    for number, image in enumerate(images):
        (root / "photos" / f"{number}.jpg").write_bytes(image)
    for command in (
        ("embed", root / "photos", tmp_path / "emb", "--model", starter),
        ("cluster", tmp_path / "emb", tmp_path / "centers", "--clusters", 4),
    ):
        made = run_mlcd(*command)
        assert made.returncode == 0, made.stderr
    given = {"centers": tmp_path / "centers", "state_dir": tmp_path / "state", "jobs__roots": root}
    with serving(starter, log__level="error", **given) as server:
        environment = {**os.environ} | {f"MLCD_{name.upper()}": str(v) for name, v in given.items()}
        httpx.put(f"{server.url}/v1/collections/soak").raise_for_status()
        words = ["a dog", "a red car", "noise", "\u041c\u043e\u0441\u043a\u0432\u0430", "x" * 500]
        first = LoadOfAll(server.url, server.port, images, nasty, 0, routes=[], words=words)
        with httpx.Client(base_url=server.url, timeout=60) as client:
            body = {"items": '[{"id": "p-0", "metadata": {"n": 1}}]'}
            client.post("/v1/collections/soak/items", files=files(images[2]), data=body)
            for number in range(len(images)):
                vector = client.post("/v1/images/embed", files=files(images[number])).json()
                first.known[number] = np.array(vector["results"][0]["embedding"])
        soak = Soak(server, images, nasty)
        routes = routes_of(server.url)
        soak.loads = [
            LoadOfAll(server.url, server.port, images, nasty, seed, routes=routes, words=words)
            for seed in range(CLIENTS)
        ]
        for load in soak.loads:
            load.known = first.known
        stop, jobs = threading.Event(), []
        run_worker = lambda: start_mlcd("worker", "--model", starter, env=environment)  # noqa: E731
        with killed_now_and_then(server, run_worker, stop) as num:
            seen = []
            for number in range(4):
                asked = {
                    "kind": "label",
                    "input": str(root / "photos"),
                    "output": str(root / f"out-{number}"),
                }
                answer = httpx.post(f"{server.url}/v1/jobs", json=asked)
                assert answer.status_code == 202, answer.text
                jobs.append(answer.json()["id"])
                seen.append(soak.load(SECONDS / 4))
            stop.set()  # from here on nothing is killed
            until(lambda: {state_of(server, job) for job in jobs} == {"succeeded"}, 300, server)
        statuses = sum((load.statuses for load in soak.loads), Counter())
        middle = [float(np.median(quarter)) for quarter in seen]
        sys.stdout.write(
            f"{SECONDS:.0f} s, {len(routes)} GET routes, killed {dict(num)}, answers {dict(statuses)},"
            f" memory by quarters {[round(value) for value in middle]} MiB\n"
        )
        assert [broken for load in soak.loads for broken in load.broken] == []
        assert statuses[503] + statuses[504] < sum(statuses.values()) / 10
        assert middle[3] - middle[1] < MOST_MIB
        for number in range(4):
            verified = run_mlcd("verify", root / f"out-{number}")
            assert verified.returncode == 0, verified.stderr


def state_of(server, job):
    return httpx.get(f"{server.url}/v1/jobs/{job}").json()["state"]
