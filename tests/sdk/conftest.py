"""A real server from the project's environment, and the clients' view of it. Only .venv-sdk has
what these tests need.
"""

import base64
import contextlib
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
    """image: the file's bytes, or text; embedding: what `mlcd embed` gave for it, [D]."""

    embedding: np.ndarray
    image: bytes = b""
    text: str = ""

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


def stored(prepared, of) -> dict:
    return json.loads((prepared / "samples.json").read_text())[of]


def seen(given) -> list[Sample]:
    return [
        Sample(np.array(one["embedding"], np.float32), image=Path(one["image"]).read_bytes())
        for one in given
    ]


@pytest.fixture(scope="session")
def samples(prepared) -> list[Sample]:
    return seen(stored(prepared, "demo")["images"])


@pytest.fixture(scope="session")
def pictures(prepared) -> list[Sample]:
    """The images as the model of two towers sees them."""
    return seen(stored(prepared, "towers")["images"])


@pytest.fixture(scope="session")
def texts(prepared) -> list[Sample]:
    given = stored(prepared, "towers")["texts"]
    return [Sample(np.array(one["embedding"], np.float32), text=one["text"]) for one in given]


@contextlib.contextmanager
def serving(model, *options):
    command = [PYTHON, "-m", "mlcd", "serve", "--model", model, "--port", "0", *options]
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
def server(prepared):
    with serving(prepared / "demo" / "model") as url:
        yield url


@pytest.fixture(scope="session")
def towers(prepared):
    """A server whose model takes texts."""
    with serving(prepared / "towers") as url:
        yield url


@pytest.fixture(scope="session")
def model(server) -> str:
    return name_of(server)


def name_of(url) -> str:
    return httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
