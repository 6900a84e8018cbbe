"""A real `mlcd serve`, and what can be seen of it from outside."""

import contextlib
import os
import re
import resource
import subprocess
import time
from functools import partial
from pathlib import Path

import httpx

from tests.conftest import free_port, start_mlcd


class Server:
    """settings: MLCD_ names without the prefix, in lower case; two underscores for nested ones.

    output: a file for all that it says, where that may be more than a pipe holds. files: how many
    it may have open.
    """

    def __init__(self, model, *, output=subprocess.PIPE, files=None, **settings):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # The fake engine is there to be loaded, by the same few images over and over.
        defaults = {"drain_s": 0} | (
            {"cache__memory_bytes": 0} if settings.get("engine") == "fake" else {}
        )
        given = {
            f"MLCD_{name.upper()}": str(value) for name, value in (defaults | settings).items()
        }
        arguments = ("serve", "--model", model, "--port", self.port)
        limited = (
            partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files)) if files else None
        )
        environment = {**os.environ, **given}
        self._start = partial(
            start_mlcd, *arguments, env=environment, stdout=output, preexec_fn=limited
        )
        self.process = self._start()

    def start_again(self):
        """Starts it at the same address, once it has stopped."""
        self.process = self._start()

    def wait_ready(self, timeout_s=60):
        until(self.ready, timeout_s, self)
        return self

    def ready(self):
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        return False

    def metric(self, name):
        """The value of one line of /metrics, 0 where it is not there."""
        found = re.search(
            rf"^{re.escape(name)} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    def worker(self):
        """The process id of the engine, None where there is none now."""
        return next(iter(self.workers()), None)

    def workers(self):
        """The process ids of the engines, that of images before that of texts."""
        found = []
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for child in path.read_text().split():
                with contextlib.suppress(FileNotFoundError):
                    if (
                        b"mlcd.service.inference.engine.worker"
                        in Path(f"/proc/{child}/cmdline").read_bytes()
                    ):
                        found.append(int(child))
        return sorted(found)

    def resident_mib(self):
        return (
            int(
                re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())[
                    1
                ]
            )
            / 1024
        )

    def stop(self):
        """Its exit status and all that it said."""
        self.process.terminate()
        output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, output


@contextlib.contextmanager
def serving(model, **settings):
    server = Server(model, **settings)
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            status, output = server.stop()
            assert (status, "Traceback" in output) == (0, False), output


@contextlib.contextmanager
def asking(model, **settings):
    """A server, and a client of it."""
    with (
        serving(model, **settings) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield server, client


def children(pid):
    """Process ids, oldest first; those that have ended and are not waited for do not count."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in path.read_text().split()]
    return sorted(child for child in found if _state(child) not in ("Z", None))


def _state(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def exists(pid):
    return Path(f"/proc/{pid}").exists()


def until(condition, timeout_s, server=None):
    """Seconds until it came to that."""
    started = time.monotonic()
    while not condition():
        if server is not None:
            assert server.process.poll() is None, server.process.stdout.read()
        assert time.monotonic() - started < timeout_s, "it never came to that"
        time.sleep(0.01)
    return time.monotonic() - started
