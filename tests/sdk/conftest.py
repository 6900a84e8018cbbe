"""A real server from the project's environment, and the clients' view of it. Only .venv-sdk has what these tests need."""

import base64
import json
import subprocess
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv" / "bin" / "python"

if find_spec("cohere") is None:
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True)
class Sample:
    """image: the file's bytes; embedding: what `mlcd embed` gave for it, [D]."""

    image: bytes
    embedding: np.ndarray

    @property
    def uri(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.image).decode()

    def is_embedding(self, vector) -> bool:
        return np.allclose(
            np.asarray(vector, np.float32).ravel(), self.embedding, rtol=0, atol=1e-5
        )


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("journey")
    subprocess.run(
        [PYTHON, "-m", "tests.sdk.journey", out], cwd=REPOSITORY, check=True, timeout=300
    )
    return out


@pytest.fixture(scope="session")
def samples(prepared) -> list[Sample]:
    stored = json.loads((prepared / "samples.json").read_text())
    return [
        Sample(Path(one["image"]).read_bytes(), np.array(one["embedding"], np.float32))
        for one in stored
    ]


@pytest.fixture(scope="session")
def server(prepared):
    command = [PYTHON, "-m", "mlcd", "serve", "--model", prepared / "demo" / "model", "--port", "0"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        deadline = time.monotonic() + 60
        while httpx.get(f"{url}/health/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture(scope="session")
def model(server) -> str:
    return httpx.get(f"{server}/v1/models").json()["data"][0]["id"]
