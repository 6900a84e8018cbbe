"""`make test-docker`: images and stacks as `docker build` and compose make them, asked from
outside.
"""

import shutil
from pathlib import Path

import pytest

from tests.conftest import run_mlcd
from tests.docker.engine import build, engine_missing


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.timeout(2400))


@pytest.fixture(scope="session")
def engine():
    if (reason := engine_missing()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def image(engine, tmp_path_factory):
    """Name of the image of a target, built once."""
    logs = tmp_path_factory.mktemp("builds")
    built = set()

    def name_of(target):
        if target not in built:
            build(target, logs / f"{target}.log")
            built.add(target)
        return f"mlcd-{target}"

    return name_of


@pytest.fixture(scope="session")
def model_dir(engine, journey, tmp_path_factory):
    """The model of `mlcd demo`, also for Triton, readable for the containers' user."""
    out = tmp_path_factory.mktemp("served")
    shutil.copytree(journey / "model", out / "model")
    made = run_mlcd(
        "export", out / "model", out / "triton-cpu", "--format", "triton", "--backend", "python"
    )
    assert made.returncode == 0, made.stderr
    for path in (out.parent, out, *out.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return out
