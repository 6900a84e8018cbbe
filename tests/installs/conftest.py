"""`make test-installs`: the wheel in an environment of its own for each extra, as users install it."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
NUM_IMAGES = 8


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel and some extras; commands run in `work`."""

    python: Path
    work: Path
    cache: Path

    def start(
        self, *command: object, settings: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }
        environment |= {"XDG_CACHE_HOME": str(self.cache), "NO_COLOR": "1"} | (settings or {})
        return subprocess.Popen(
            [str(self.python), "-m", *map(str, command)],
            cwd=self.work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, *command: object, timeout: float = 600, settings: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Returns the exit status and all that was printed."""
        process = self.start(*command, settings=settings)
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output


def installer():
    """Returns how an environment is made and filled: by uv in seconds, where it is at hand."""
    beside = str(Path(sys.executable).parent)
    uv = shutil.which("uv", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if uv is None:
        pip = [sys.executable, "-m", "pip", "--python"]
        return [sys.executable, "-m", "venv", "--without-pip"], lambda python: [
            *pip,
            python,
            "install",
        ]
    where = [uv, "venv", "--quiet", "--no-project", "--python", sys.executable]
    return where, lambda python: [uv, "pip", "install", "--python", python]


def call(command):
    # uv has pip's switches under names of its own
    switches = ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL")
    taken = {
        f"UV_{name}": os.environ[f"PIP_{name}"] for name in switches if f"PIP_{name}" in os.environ
    }
    result = subprocess.run(
        list(map(str, command)),
        env=taken | dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def build_wheel(source, folder):
    """Builds the wheel of a checkout into this folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=source, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installation(wheel, tmp_path_factory):
    """Returns the environment with a wheel and these extras, and eight images to work on."""
    cache = tmp_path_factory.mktemp("cache")

    def installed(*extras, wheel=wheel):
        folder = tmp_path_factory.mktemp("-".join(extras) or "none")
        make, install = installer()
        call([*make, folder / "env"])
        python = folder / "env" / "bin" / "python"
        named = f"[{','.join(extras)}]" if extras else ""
        call([*install(python), "-c", ROOT / "constraints.txt", f"mlcd{named} @ {wheel.as_uri()}"])
        write_images(folder / "photos", NUM_IMAGES)
        return Installation(python, folder, cache)

    return installed


def write_images(folder, num):
    """Writes images of two classes: dark ones and light ones."""
    rng = np.random.default_rng(0)
    for number in range(num):
        path = folder / ("dark", "light")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 100, (48, 64, 3)) + 150 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
