"""Docker as its users have it: the engine's client and compose, and a stack of containers that is
gone afterwards.
"""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Self

import httpx

from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 120
PYTHON_IMAGE = "python:3.11-slim-bookworm"  # no registry is reached for its digest
_COMPOSE_V2 = ROOT / ".venv-compose" / "compose" / "docker-compose"  # of `make test-docker`


def docker(*arguments: object, check: bool = True, **options) -> subprocess.CompletedProcess[str]:
    return _run(["docker", *map(str, arguments)], check=check, **options)


def build(target: str, log: Path) -> None:
    """Build the image mlcd-TARGET; the log is a file."""
    command = [
        "build",
        "--progress",
        "plain",
        "--network",
        "host",
        "--build-arg",
        f"PYTHON_IMAGE={PYTHON_IMAGE}",
        "--target",
        target,
        "--tag",
        f"mlcd-{target}",
        ROOT,
    ]
    result = docker(*command, check=False, timeout=1800)
    log.write_text(result.stdout + result.stderr)
    assert result.returncode == 0, log.read_text()[-3000:]


def image_size(name: str) -> int:
    """Bytes, uncompressed."""
    return json.loads(docker("image", "inspect", name).stdout)[0]["Size"]


class Stack:
    """Services of docker-compose.yml under a project name of their own.

    root: the checkout that they are those of.
    """

    def __init__(
        self,
        name: str,
        *files: str,
        profiles: tuple[str, ...] = (),
        root: Path = ROOT,
        **environment: object,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._root = root
        self.command = [*compose_command(), "--project-name", name]
        for file in ("docker-compose.yml", *files, "tests/docker/compose.yml"):
            self.command += ["--file", str(root / file)]
        for profile in profiles:
            self.command += ["--profile", profile]
        given = {key: str(value) for key, value in environment.items()}
        self.environment = {**os.environ, "PORT": str(self.port), **given}

    def __enter__(self) -> Self:
        self("down", "--volumes", "--remove-orphans")
        return self

    def __exit__(self, *_: object) -> None:
        self("down", "--volumes", "--remove-orphans")

    def __call__(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _run(
            [*self.command, *arguments],
            check=check,
            cwd=self._root,
            env=self.environment,
            timeout=1800,
        )

    def wait_ready(self, timeout_s: float = START_S) -> None:
        self._wait(
            lambda: httpx.get(f"{self.url}/health/ready", timeout=2).status_code == 200, timeout_s
        )

    def wait_healthy(self, service: str, timeout_s: float = START_S) -> None:
        self._wait(
            lambda: self.inspect(service)["State"].get("Health", {}).get("Status") == "healthy",
            timeout_s,
        )

    def wait_restarted(self, service: str, before: int, timeout_s: float = START_S) -> None:
        self._wait(lambda: self.inspect(service)["RestartCount"] > before, timeout_s)

    def inspect(self, service: str) -> dict:
        return json.loads(docker("inspect", self.container(service)).stdout)[0]

    def container(self, service: str) -> str:
        return self("ps", "--all", "--quiet", service).stdout.strip()

    def execute(self, service: str, *command: str, check: bool = True, **options) -> str:
        return docker(
            "exec", "--interactive", self.container(service), *command, check=check, **options
        ).stdout

    def kill(self, service: str, name: str) -> None:
        """SIGKILL to the process `name`, from inside: what `docker kill` ends is not
        started again.
        """
        before = self.inspect(service)["RestartCount"]
        script = (
            'for p in /proc/[0-9]*; do tr "\\0" " " < $p/cmdline | grep -q "^$0" '
            "&& kill -9 ${p#/proc/}; done"
        )
        self.execute(service, "sh", "-c", script, name, check=False)
        self.wait_restarted(service, before)

    def _wait(self, there, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if there():
                    return
            except (httpx.HTTPError, subprocess.CalledProcessError, ValueError, IndexError):
                pass
            assert time.monotonic() < deadline, self("logs", "--tail", "40").stdout
            time.sleep(0.5)


def engine_missing() -> str | None:
    """Why nothing here can run, None where it can."""
    if shutil.which("docker") is None or docker("info", check=False).returncode != 0:
        return "no Docker engine answers"
    return None if compose_command() else "Compose v2 is not installed (make test-docker does it)"


def compose_command() -> list[str]:
    """Returns the command of Compose v2; nothing where there is none."""
    if docker("compose", "version", check=False).returncode == 0:
        return ["docker", "compose"]
    return [str(_COMPOSE_V2)] if _COMPOSE_V2.is_file() else []


def _run(command: list[str], *, check: bool, **options) -> subprocess.CompletedProcess[str]:
    options = {"timeout": 300} | options
    if "env" not in options:
        options["env"] = {**os.environ, "DOCKER_BUILDKIT": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert not check or result.returncode == 0, (
        f"{command}: {result.stdout[-2000:]}{result.stderr[-2000:]}"
    )
    return result
