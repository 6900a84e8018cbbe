"""Each extra installs enough to import what it is for."""

import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


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
            "mlcd.cli, service.serve.cli, service.http.app, service.worker.cli, service.jobs.cli",
        ),
        (("train",), "mlcd.cli, training.cli, training.run"),
    ],
)
def test_what_an_extra_installs_is_enough(extras, modules, distributions):
    """All other packages are hidden, as they are where nobody installed them."""
    installed = installed_with(extras)
    hidden = [module for module, names in distributions.items() if not names & installed]
    assert {"torch", "onnx"} - set(hidden) == ({"torch", "onnx"} if "train" in extras else set())
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
