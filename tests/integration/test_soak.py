"""Minutes of mixed load on a real server, with kills: what grows, breaks or differs is found.

SOAK_SECONDS gives another length, and is this test's own.
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
CLIENTS = 6
KILLED_EVERY_S = 30  # a worker that starts and labels a part takes a third of it on two cores
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
    sides = [(1, 1), (8, 8), (500, 375), (375, 500), (640, 480), (1024, 768), (2000, 1500)]
    sides += [(4000, 3000), (3000, 40)]
    kinds = itertools.cycle(("JPEG", "PNG", "WEBP", "JPEG"))
    return [picture(*side, next(kinds), seed=seed) for seed, side in enumerate(sides * 3)]


class Load:
    """One client of every route of the schema: a request of some kind after the other, until told
    to stop. What must stay the same is compared.

    known: the embedding of each image, by its number.
    """

    def __init__(self, server, images, nasty, seed, *, routes, words, known):
        self.url, self.port, self.images, self.nasty = server.url, server.port, images, nasty
        self.routes, self.words, self.known = routes, words, known
        self.random, self.statuses, self.broken = random.Random(seed), Counter(), []

    def run(self, stop):
        kinds = [self.read] * 8 + [self.same] * 2 + [self.search, self.add, self.remove]
        kinds += [self.texts, self.classify, self.labels, self.openai, self.bad, self.wrong]
        kinds += [self.leave, self.duplicates]
        while not stop.is_set():
            with httpx.Client(base_url=self.url, timeout=120) as client:
                for _ in range(self.random.randrange(1, 20)):
                    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                        if not stop.is_set():
                            self.note(self.random.choice(kinds)(client))

    def note(self, answer):
        if answer is None:
            return
        self.statuses[answer.status_code] += 1
        # an engine was killed, or what has a deadline was behind too much else
        if answer.status_code in (503, 504):
            assert answer.status_code == 504 or "retry-after" in answer.headers
        elif answer.status_code >= 500:
            self.broken.append((answer.status_code, answer.text[:300]))

    def fresh(self):
        """One that no cache has, in half of the cases."""
        image = self.random.choice(self.images)
        return image + self.random.randbytes(8) if self.random.random() < 0.5 else image

    def read(self, client):
        return client.get(self.random.choice(self.routes))

    def same(self, client):
        """Asks for what was answered before, and notes an answer that differs."""
        number = self.random.randrange(len(self.images))
        answer = client.post("/v1/images/embed", files=files(self.images[number]))
        if answer.status_code == 200:
            vector = np.array(answer.json()["results"][0]["embedding"])
            if float(vector @ self.known[number]) < 1 - 1e-5:
                self.broken.append(("another embedding", number))
        return answer

    def openai(self, client):
        model = client.get("/v1/models").json()["data"][0]["id"]
        asked = {"model": model, "input": [data_uri(self.fresh())]}
        return client.post("/v1/embeddings", json=asked)

    def labels(self, client):
        top = self.random.randrange(1, 13)
        return client.post(f"/v1/labels?top={top}", files=files(self.fresh()))

    def bad(self, client):
        images = self.random.choice(self.nasty), self.fresh()[:-200]
        return client.post("/v1/images/embed", files=files(*images))

    def wrong(self, client):
        wrong = [
            ("/v1/labels", {"json": {"embeddings": [["x"]]}}),
            ("/v1/embeddings", {"content": b"{"}),
            (f"/nowhere/{self.random.random()}", {}),
        ]
        path, body = self.random.choice(wrong)
        return client.post(path, **body)

    def leave(self, client):
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            body = self.fresh()
            head = (
                "POST /v1/images/embed HTTP/1.1\r\nHost: x\r\nContent-Type: "
                f"image/png\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body[: self.random.randrange(len(body))])

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


def family(pid):
    return [pid, *(member for child in children(pid) for member in family(child))]


def memory_mib(pids):
    """Returns the memory of all processes; shared pages count once."""
    texts = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it was killed meanwhile
            texts.append(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return sum(int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) for text in texts) / 1024


def loaded(server, loads, seconds):
    """Memory at every second of it, in MiB."""
    stop, seen = threading.Event(), []
    threads = [threading.Thread(target=load.run, args=(stop,)) for load in loads]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        seen.append(memory_mib(family(server.process.pid)))
    stop.set()
    for thread in threads:
        thread.join()
    return seen


def at_rest(server):
    """The numbers of the server's threads and open files, when nobody asks anything."""
    until(lambda: server.metric('mlcd_held{of="bytes"}') == 0, 30)
    time.sleep(IDLE_S)
    # goes to a file, by such a thread: the others end then
    large = picture(4000, 3000, "PNG", seed=0)
    httpx.post(f"{server.url}/v1/images/embed", files=files(large), timeout=60)
    time.sleep(1)
    folder = Path(f"/proc/{server.process.pid}")
    return [len(list((folder / what).iterdir())) for what in ("task", "fd")]


@pytest.fixture
def nasty(shared_data):
    paths = sorted((shared_data / "nasty_images").rglob("*"))
    images = [path.read_bytes() for path in paths if path.is_file()]
    return [image for image in images if len(image) < 2**22]


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
        known = {}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            body = {"items": '[{"id": "p-0", "metadata": {"n": 1}}]'}
            client.post("/v1/collections/soak/items", files=files(images[2]), data=body)
            for number, image in enumerate(images):
                vector = client.post("/v1/images/embed", files=files(image)).json()
                known[number] = np.array(vector["results"][0]["embedding"])
        same = {"routes": routes_of(server.url), "words": words, "known": known}
        loads = [Load(server, images, nasty, seed, **same) for seed in range(CLIENTS)]
        stop, jobs, seen, resting = threading.Event(), [], [], []
        run_worker = lambda: start_mlcd("worker", "--model", starter, env=environment)  # noqa: E731
        with killed_now_and_then(server, run_worker, stop) as num:
            for number in range(4):
                asked = {"kind": "label", "input": str(root / "photos")}
                asked["output"] = str(root / f"out-{number}")
                answer = httpx.post(f"{server.url}/v1/jobs", json=asked)
                assert answer.status_code == 202, answer.text
                jobs.append(answer.json()["id"])
                seen.append(loaded(server, loads, SECONDS / 4))
                if number in (0, 3):
                    until(server.ready, 30, server)
                    resting.append(at_rest(server))
            stop.set()  # from here on nothing is killed
            until(lambda: {state_of(server, job) for job in jobs} == {"succeeded"}, 300, server)
        statuses = sum((load.statuses for load in loads), Counter())
        middle = [float(np.median(quarter)) for quarter in seen]
        sys.stdout.write(
            f"{SECONDS:.0f} s, {len(same['routes'])} GET routes, killed {dict(num)}, answers "
            f"{dict(statuses)}, memory by quarters {[round(value) for value in middle]} MiB, "
            f"threads and files {resting}\n"
        )
        assert [broken for load in loads for broken in load.broken] == []
        assert statuses[200] > SECONDS
        assert statuses[503] + statuses[504] < sum(statuses.values()) / 10
        assert middle[3] - middle[1] < MOST_MIB
        # the watch over an engine that was killed may be another thread, or a file less
        assert max(after - before for before, after in zip(*resting, strict=True)) <= 2
        for number in range(4):
            verified = run_mlcd("verify", root / f"out-{number}")
            assert verified.returncode == 0, verified.stderr


def state_of(server, job):
    return httpx.get(f"{server.url}/v1/jobs/{job}").json()["state"]
