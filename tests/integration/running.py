"""A real `mlcd serve`, and what can be seen of it from outside."""

import contextlib
import os
import re
import time
from pathlib import Path

import httpx

from tests.conftest import free_port, start_mlcd


class Server:
    """settings: MLCD_ names without the prefix, in lower case; two underscores for nested ones."""

    def __init__(self, model, **settings):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = {f"MLCD_{name.upper()}": str(value) for name, value in ({"drain_s": 0} | settings).items()}
        self.process = start_mlcd("serve", "--model", model, "--port", self.port, env={**os.environ, **given})

    def wait_ready(self, timeout_s=60):
        until(self.ready, timeout_s, self)
        return self

    def ready(self):
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        return False

    def metric(self, name):
        """The value of one line of /metrics, 0 where it is not there."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def worker(self):
        """The process id of the engine, None where there is none now."""
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for child in path.read_text().split():
                with contextlib.suppress(FileNotFoundError):
                    if b"service.dispatch.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
        return None

    def resident_mib(self):
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())[1]) / 1024

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
