"""The real Triton server, bundled with nvidia-pytriton in an environment of its own: `make
test-triton` installs it.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from mlcd.export.triton import export_triton
from mlcd.export.triton_config import TritonOptions
from mlcd.images.transform import PreprocessSpec
from mlcd.models.servable import Servable
from mlcd.progress import Reporter
from tests.conftest import free_port
from tests.unit.models.test_checkpoints import SIZES, tower, write_hf
from tests.unit.service.conftest import pytest_pyfunc_call  # noqa: F401 - a hook

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-triton" / "bin" / "python"
LAUNCHER = ROOT / "deploy" / "triton" / "serve.py"
SILENT = Reporter("silent")
START_S = 60
SLOW_S = 0.3
SLOW_BATCH = 2
SLOW_QUEUE = 8
SLOW = f"""

class TritonPythonModel(TritonPythonModel):
    def execute(self, requests):
        import time
        time.sleep({SLOW_S})
        return super().execute(requests)
"""
BROKEN = """

class TritonPythonModel(TritonPythonModel):
    def execute(self, requests):
        if (Path(__file__).parent / "broken").exists():
            raise ValueError("a secret of the server")
        return super().execute(requests)
"""


class Server:
    """One server on ports of its own; `kill`, `pause` and `start` do to it what happens
    to servers.
    """

    def __init__(self, repository: Path, log: Path) -> None:
        self.repository, self.log = repository, log
        self.ports = {name: free_port() for name in ("http", "grpc", "metrics")}
        self.url = f"127.0.0.1:{self.ports['grpc']}"

    def start(self) -> None:
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [PYTHON, LAUNCHER, self.repository, *ports],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not self._answers("v2/health/ready"):
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, "Triton did not start"
            time.sleep(0.05)

    def kill(self) -> None:
        self.resume()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # What the process would have removed itself.
        for region in Path("/dev/shm").glob(f"mlcd-triton-{self._process.pid}-*"):
            region.unlink(missing_ok=True)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def load(self, name: str) -> None:
        self._control(name, "load")

    def unload(self, name: str) -> None:
        self._control(name, "unload")

    def metric(self, name: str, model: str, **labels: str) -> float:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.ports['metrics']}/metrics", timeout=5
        ) as answer:
            lines = answer.read().decode().splitlines()
        wanted = {f'{key}="{value}"' for key, value in {"model": model, **labels}.items()}
        rows = [
            line
            for line in lines
            if line.startswith(name + "{") and wanted <= set(re.findall(r'\w+="[^"]*"', line))
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in rows)

    def resident_mib(self) -> list[float]:
        """Returns the memory of each process: the server, and a stub for each model version."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(path.name)) == self._process.pid:
                    found.append(
                        int((path / "statm").read_text().split()[1])
                        * os.sysconf("SC_PAGE_SIZE")
                        / 2**20
                    )
        return found

    def _control(self, name: str, verb: str) -> None:
        request = urllib.request.Request(
            self._http(f"v2/repository/models/{name}/{verb}"), data=b"{}"
        )
        urllib.request.urlopen(request, timeout=START_S).close()

    def _answers(self, path: str) -> bool:
        try:
            urllib.request.urlopen(self._http(path), timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _http(self, path: str) -> str:
        return f"http://127.0.0.1:{self.ports['http']}/{path}"


def write_model(folder: Path, seed: int = 0) -> Path:
    """A tiny tower of random weights in Hugging Face's layout: what `mlcd export` takes."""
    folder.mkdir(parents=True)
    write_hf(tower(SIZES[1], seed=seed), folder)
    return folder


def export(weights: Path, out: Path, name: str, **options) -> None:
    chosen = TritonOptions("python", num_threads=1, **options)
    export_triton(str(weights), out, name=name, options=chosen, reporter=SILENT)


@contextlib.contextmanager
def flooded(server: Server, name: str):
    """Another client keeps `name` at work for a second and a half ahead, with room in its queue for
    two who wait.
    """
    client, ended = InferenceServerClient(server.url), threading.Event()
    sides = client.get_model_config(name, as_json=True)["config"]["input"][0]["dims"]
    batch = np.ones((SLOW_BATCH, *map(int, sides)), np.uint8)
    given = InferInput("image_u8", list(batch.shape), "UINT8")
    given.set_data_from_numpy(batch)

    def ask() -> None:
        while not ended.is_set():
            with contextlib.suppress(InferenceServerException):  # its queue is full
                client.infer(name, [given])

    with ThreadPoolExecutor(SLOW_QUEUE - 2) as pool:
        asking = [pool.submit(ask) for _ in range(SLOW_QUEUE - 2)]
        time.sleep(SLOW_S)
        try:
            yield
        finally:
            ended.set()
            for one in asking:
                one.result()
            client.close()


def require_triton() -> None:
    if not PYTHON.is_file():
        pytest.skip("the bundled Triton is not installed (make test-triton)")
    check = subprocess.run(
        [PYTHON, LAUNCHER, "--check"], capture_output=True, text=True, check=False
    )
    if check.returncode != 0:
        pytest.skip(check.stderr.strip())


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("weights") / "tower")


@pytest.fixture(scope="session")
def repository(tmp_path_factory, weights, two_tower_model) -> Path:
    """tiny: as exported. slow, broken: with a model.py that sleeps or fails. bare: without what
    mlcd writes. pair, pair-text: both towers of a model.
    """
    require_triton()
    out = tmp_path_factory.mktemp("triton") / "repository"
    export(weights, out, "tiny")
    export(two_tower_model, out, "pair")
    for name, code in (("slow", SLOW), ("broken", BROKEN), ("bare", "")):
        _copy(out, "tiny", name, code)
    config = out / "slow" / "config.pbtxt"
    text = config.read_text().replace("max_batch_size: 64", f"max_batch_size: {SLOW_BATCH}")
    text = text.replace("batch_size: 64", f"batch_size: {SLOW_BATCH}")
    config.write_text(text.replace("max_queue_size: 256", f"max_queue_size: {SLOW_QUEUE}"))
    bare = out / "bare" / "config.pbtxt"
    kept = (line for line in bare.read_text().splitlines() if '"fingerprint.1"' not in line)
    bare.write_text("\n".join(kept))
    return out


def _copy(out: Path, source: str, name: str, code: str) -> None:
    shutil.copytree(out / source, out / name)
    config = out / name / "config.pbtxt"
    config.write_text(config.read_text().replace(f'name: "{source}"', f'name: "{name}"'))
    script = out / name / "1" / "model.py"
    script.write_text(script.read_text() + code)


@pytest.fixture(scope="session")
def shared_server(repository, tmp_path_factory):
    server = Server(repository, tmp_path_factory.mktemp("log") / "triton.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(shared_server):
    """The one server, up and with every model loaded, whatever the last test did to it."""
    shared_server.resume()
    return shared_server


@pytest.fixture
def own_server(repository, tmp_path):
    """A server that the test may kill; with a copy of the model tiny that it may replace."""
    place = tmp_path / "repository"
    shutil.copytree(repository / "tiny", place / "tiny")
    server = Server(place, tmp_path / "triton.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def pictures(weights, digits) -> np.ndarray:
    """Real images, prepared: uint8 [64, 3, S, S]."""
    preprocess: PreprocessSpec = Servable(tower(SIZES[1]), _spec(weights)).preprocess
    paths = sorted(digits.rglob("*.png"))[:64]
    return np.stack([preprocess.apply(Image.open(path).convert("RGB")) for path in paths])


def _spec(weights: Path) -> PreprocessSpec:
    from mlcd.models import zoo

    return zoo.load(str(weights)).preprocess
