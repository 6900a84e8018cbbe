"""The images install deploy/locks, which must match pyproject.toml and constraints.txt by `make
lock`.
"""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = {
    "api": ("serve", "redis", "triton", "tracing"),
    "api-gpu": ("serve", "redis", "triton", "tracing"),
    "train": ("serve", "train", "train-gpu"),
}
REPLACED = {"api-gpu": {"faiss-cpu"}}  # by FAISS for GPUs, with which it shares a module name
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)


def pins(path):
    return {canonicalize_name(name): version for name, version in PIN.findall(path.read_text())}


def lock(name):
    return ROOT / "deploy" / "locks" / f"{name}.txt"


@pytest.mark.parametrize("name", EXTRAS)
def test_every_requirement_is_locked_at_a_version_that_it_allows(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in EXTRAS[name] for line in project["optional-dependencies"][extra]),
    ]
    locked = pins(lock(name))
    for requirement in map(Requirement, wanted):
        if requirement.name in REPLACED.get(name, ()):
            assert requirement.name not in locked
            continue
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize("name", EXTRAS)
def test_versions_are_those_that_the_tests_run_with(name):
    constrained = pins(CONSTRAINTS)
    locked = pins(lock(name))
    assert {
        package: version
        for package, version in locked.items()
        if constrained.get(package, version) != version
    } == {}


@pytest.mark.parametrize("name", ["api", "api-gpu", "train", "triton", "build"])
def test_every_package_has_a_hash_and_none_reports_to_its_maker(name):
    blocks = re.split(
        r"\n(?=\S)",
        "\n".join(line for line in lock(name).read_text().splitlines() if line[:1] != "#"),
    )
    assert len(blocks) == len(pins(lock(name)))
    assert all("--hash=sha256:" in block for block in blocks)
    assert "openvino-telemetry" not in pins(lock(name))


def test_the_api_is_locked_without_torch():
    assert "torch" not in pins(lock("api"))


def test_the_api_of_a_gpu_is_locked_with_torch_and_faiss_for_it_and_without_the_trainer():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = pins(lock("api-gpu"))
    assert "faiss-gpu-cuvs" in locked
    assert f"torch=={locked['torch']}" in project["optional-dependencies"]["train"]
    assert not {"onnx", "onnxscript", "scikit-image", "scikit-learn", "scipy"} & locked.keys()
    overrides = ROOT / "deploy" / "locks" / "api-gpu.overrides"
    for line in overrides.read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            assert locked[requirement.name] in requirement.specifier


def test_what_builds_and_what_triton_needs_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pins(lock("build")).items() >= {
        tuple(line.split("==")) for line in project["build-system"]["requires"]
    }
    wanted = pins(ROOT / "deploy" / "triton" / "requirements.txt")
    wanted.pop("openvino-telemetry", None)
    assert pins(lock("triton")) == wanted


def test_what_is_pinned_goes_with_the_python_of_debian_12():
    """`make setup` on a machine where nobody has installed another one: 3.11.2."""
    asked = {
        name: importlib.metadata.metadata(name)["Requires-Python"]
        for name in installed(pins(CONSTRAINTS))
    }
    assert len(asked) > 100
    assert [
        name for name, wanted in asked.items() if wanted and "3.11.2" not in SpecifierSet(wanted)
    ] == []


def installed(names):
    present = {canonicalize_name(found.name) for found in importlib.metadata.distributions()}
    return present & set(names)
