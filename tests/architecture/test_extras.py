"""Each extra installs enough to import what it is for."""

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mlcd import extras

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = ("mlcd", "service", "training")
# what is imported only where it is: in PyTorch's CUDA builds, and inside of a Triton server; and a
# namespace of many distributions, of which the extra train-gpu brings nvImageCodec
NOT_OURS = {"triton", "triton_python_backend_utils", "nvidia"}


@pytest.fixture(scope="module")
def distributions():
    """The names of the distributions that hold each module of this environment."""
    return {
        module: {canonicalize_name(each) for each in names}
        for module, names in metadata.packages_distributions().items()
    }


def installed_with(extras):
    """Returns the names of all distributions that `pip install mlcd[extras]` brings."""
    found, asked = set(), [("mlcd", frozenset(extras))]
    while asked:
        if (each := asked.pop()) in found:
            continue
        found.add(each)
        name, wanted = each
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform
            continue
        asked += [
            (canonicalize_name(requirement.name), frozenset(requirement.extras))
            for requirement in map(Requirement, lines)
            if requirement.marker is None
            or any(requirement.marker.evaluate({"extra": extra}) for extra in wanted | {""})
        ]
    return {name for name, _ in found}


@pytest.mark.parametrize(
    ("extras", "modules"),
    [
        ((), "mlcd, mlcd.cli"),
        (("client",), "mlcd.client"),
        (
            ("serve",),
            "mlcd.cli, mlcd.service.serve.cli, mlcd.service.http.app, mlcd.service.worker.cli, mlcd.service.jobs.cli",
        ),
        (("train",), "mlcd.cli, mlcd.training.cli, mlcd.training.run.run_training"),
    ],
)
def test_what_an_extra_installs_is_enough(extras, modules, distributions):
    """All other packages are hidden, as they are where nobody installed them."""
    installed = installed_with(extras)
    hidden = [module for module, names in distributions.items() if not names & installed]
    assert {"torch", "onnx"} - set(hidden) == ({"torch", "onnx"} if "train" in extras else set())
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def imported():
    """Returns the modules of others that the products import anywhere, with the files."""
    found = {}
    for path in (path for product in PRODUCTS for path in (ROOT / product).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                # of a namespace package such as `opentelemetry`, the part tells the distribution
                names = [f"{node.module}.{each.name}" for each in node.names]
            for name in names:
                if name.partition(".")[0] not in sys.stdlib_module_names | {*PRODUCTS, *NOT_OURS}:
                    found.setdefault(name, path.relative_to(ROOT).as_posix())
    return found


def test_every_package_that_is_imported_is_declared(distributions):
    """One that only another package brings is gone when that one does without it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tables = project["optional-dependencies"]
    declared = {
        canonicalize_name(Requirement(line).name)
        for table in (project["dependencies"], *(tables[name] for name in tables if name != "dev"))
        for line in table
    }
    undeclared = {
        name: path
        for name, path in imported().items()
        if not distributions.get(top := name.partition(".")[0], {canonicalize_name(top)}) & declared
    }
    assert undeclared == {}


def test_the_remedy_knows_the_distribution_of_every_module(distributions):
    """The name of the module has to be enough where none of them is installed."""
    for name in imported():
        top = name.partition(".")[0]
        assert extras.distribution_of(name) in distributions.get(top, {canonicalize_name(top)})
