"""A parquet file of URLs through `mlcd embed --url-column`: a tenth is broken, one host is slow.

    unshare -rn python benchmarks/url_list.py

In a network namespace of its own the hosts have public addresses, and every other address is this
machine's, too, so that a connection to a private one would be counted. Of each ten URLs nine are
good; a tenth of the good ones is of a host that takes `--slow-s` for each. The broken ones are
missing, no images, broken off, too late, or lead to private addresses. The slow host's share is
what its images take alone: 8 at a time.
"""

import argparse
import collections
import io
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from mlcd.fetching.policy import FetchPolicy

HOSTS: Final = [f"93.184.216.{number}" for number in range(1, 21)]
SLOW: Final = "93.184.217.1"
DEAD: Final = "93.184.217.2"
PRIVATE: Final = ["10.0.0.5", "172.16.3.4", "192.168.1.1", "127.0.0.1", "169.254.169.254"]
BROKEN: Final = {
    "missing": "fetch-failed",
    "no-image": "fetch-failed",
    "broken-off": "fetch-failed",
    "late": "fetch-late",
    "no-format": "unsupported-format",
    "redirect": "url-refused",
    "private": "url-refused",
}
HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--urls", type=int, default=10_000)
    parser.add_argument("--slow-s", type=float, default=1.0)
    parser.add_argument("--timeout-s", type=float, default=2.0)
    parser.add_argument("--model", default="pixels")
    arguments = parser.parse_args()
    _make_network()
    web = Web(arguments.slow_s, arguments.timeout_s)
    kinds, urls = _urls(arguments.urls)
    num_slow = sum(SLOW in url for url in urls)
    num_late = kinds.count("late")
    at_once = FetchPolicy().max_connections_per_host
    share_s = max(num_slow * arguments.slow_s, num_late * arguments.timeout_s) / at_once
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.table({"url": urls}), f"{folder}/urls.parquet", row_group_size=2000)
        command = [sys.executable, "-m", "mlcd", "embed", f"{folder}/urls.parquet", f"{folder}/out"]
        command += ["--model", arguments.model, "--url-column", "url"]
        started = time.monotonic()
        subprocess.run([*command, "--url-timeout", str(arguments.timeout_s)], check=True)
        took_s = time.monotonic() - started
        lines = (Path(folder) / "out" / "errors.jsonl").read_text().splitlines()
    _report(kinds, [json.loads(line) for line in lines], web, took_s, share_s)


def _make_network() -> None:
    """Gives the namespace's loopback the hosts' addresses, and those that nobody may reach."""
    named = {address for _, address in socket.if_nameindex()} - {"lo", "sit0", "tunl0"}
    if named:
        sys.exit(f"run it as `unshare -rn python {sys.argv[0]}`: here is a network, {named}")
    for address in (*HOSTS, SLOW, DEAD, *(set(PRIVATE) - {"127.0.0.1"})):
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _urls(num: int) -> tuple[list[str], list[str]]:
    """Returns what each URL is, and the URLs."""
    kinds, urls, broken = [], [], list(BROKEN)
    for number in range(num):
        if number % 10 == 3:
            kind = broken[number // 10 % len(broken)]
            host = DEAD if kind == "late" else HOSTS[number % len(HOSTS)]
            host = PRIVATE[number // 10 % len(PRIVATE)] if kind == "private" else host
        else:
            kind = "good"
            host = SLOW if number % 10 == 7 else HOSTS[number % len(HOSTS)]
        kinds.append(kind)
        urls.append(f"http://{host}/{kind}/{number}.jpg?token=hush-{number}")
    return kinds, urls


class Web:
    """All hosts. private: connections to addresses that are not public."""

    def __init__(self, slow_s: float, late_s: float) -> None:
        buffer = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(buffer, "JPEG")
        self.image, self.slow_s, self.late_s = buffer.getvalue(), slow_s, late_s
        self.private, self.requests = 0, 0
        self.most: collections.Counter[str] = collections.Counter()
        self._now: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        for address in (*HOSTS, SLOW, DEAD, *PRIVATE):
            listener = socket.create_server((address, 80), backlog=256)
            threading.Thread(target=self._accept, args=[listener, address], daemon=True).start()

    def _accept(self, listener: socket.socket, address: str) -> None:
        while True:
            connection, _ = listener.accept()
            self.private += address in PRIVATE
            threading.Thread(target=self._serve, args=[connection, address], daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        # clients that have enough go away
        with suppress(ConnectionError), connection, connection.makefile("rb") as reader:
            while line := reader.readline():
                while reader.readline().strip():
                    pass
                with self._lock:
                    self.requests += 1
                    self._now[address] += 1
                    self.most[address] = max(self.most[address], self._now[address])
                try:
                    kind, _, rest = line.decode().split(" ")[1][1:].partition("/")
                    if not self._answer(connection, address, kind, int(rest.partition(".")[0])):
                        return
                finally:
                    with self._lock:
                        self._now[address] -= 1

    def _answer(self, connection: Any, address: str, kind: str, number: int) -> bool:
        """Answers one request; False where the connection is of no more use."""
        if kind == "late":
            time.sleep(2 * self.late_s)
            return False
        if address == SLOW:
            time.sleep(self.slow_s)
        image = b"no image" if kind == "no-format" else self.image
        if kind == "missing":
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        elif kind == "no-image":
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nno"
            connection.sendall(head)
        elif kind == "redirect":
            to = f"http://{PRIVATE[number % len(PRIVATE)]}/good/0.jpg"
            head = f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(head.encode())
        elif kind == "broken-off":
            connection.sendall(HEAD % len(image) + image[: len(image) // 2])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        else:
            connection.sendall(HEAD % len(image) + image)
        return True


def _report(
    kinds: list[str], errors: list[dict[str, str]], web: Web, took_s: float, share_s: float
) -> None:
    found = {int(error["key"].rpartition("/")[2]): error for error in errors}
    expected = {number: BROKEN[kind] for number, kind in enumerate(kinds) if kind in BROKEN}
    listed = {number: error["reason"] for number, error in found.items()}
    counts = collections.Counter(kinds)
    print(f"{len(kinds)} URLs of {len(HOSTS) + 2} hosts, {web.requests} requests: {dict(counts)}")
    print(f"broken ones listed with their reason: {listed == expected} ({len(listed)})")
    print(f"tokens of URLs in the list of errors: {sum('hush' in str(each) for each in errors)}")
    print(f"connections to private addresses: {web.private}")
    print(f"most at one host at one time: {max(web.most[host] for host in (*HOSTS, SLOW))}")
    ratio = took_s / share_s
    print(f"{took_s:.1f} s, the slowest host's share {share_s:.1f} s: ratio {ratio:.3f}")
    if listed != expected:
        wrong = [key for key in {**listed, **expected} if listed.get(key) != expected.get(key)]
        for key in wrong[:5]:
            print(f"  {kinds[key]} {key}: {found.get(key)}")


if __name__ == "__main__":
    main()
