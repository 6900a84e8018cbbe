"""One command installs what is missing, and holds for a checkout, a wheel and an index."""

import json
import re
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from mlcd import extras

REQUIRES = """
Requires-Dist: numpy>=2.1
Requires-Dist: threadpoolctl>=3.8
Requires-Dist: faiss-cpu>=1.12; extra == 'serve'
Requires-Dist: missing-web>=1; extra == 'serve'
Requires-Dist: tokenizers>=0.22; extra == 'serve'
Requires-Dist: missing-trainer; (python_version < '4') and extra == "train"
Requires-Dist: missing-images; extra == 'train'
Requires-Dist: scikit-image>=0.25; extra == 'train'
Requires-Dist: missing-web>=1; extra == 'train'
Requires-Dist: tokenizers>=0.22; extra == 'text'
Requires-Dist: missing.client[grpc]>=2; extra == 'triton'
Requires-Dist: scipy>=1; extra == 'dev'
"""


class Installed(Distribution):
    """The metadata of an installation from the place that `origin` tells, as PEP 610 has it."""

    def __init__(self, origin):
        self._files = {
            "METADATA": f"Metadata-Version: 2.3\nName: mlcd\nVersion: 1{REQUIRES}",
            "direct_url.json": None if origin is None else json.dumps(origin),
        }

    def read_text(self, filename):
        return self._files.get(filename)

    def locate_file(self, path):
        raise NotImplementedError


@pytest.fixture
def installed_from(monkeypatch):
    def place(origin):
        real = extras.distribution
        own = Installed(origin)
        monkeypatch.setattr(
            extras, "distribution", lambda name: own if name == "mlcd" else real(name)
        )

    return place


def test_from_an_index_it_is_the_name(installed_from):
    installed_from(None)
    assert extras.install_command("ray", "train") == "pip install 'mlcd[ray,train]'"


def test_from_a_checkout_it_is_its_folder(installed_from, tmp_path):
    folder = tmp_path / "my checkout"
    folder.mkdir()
    installed_from({"url": folder.as_uri(), "dir_info": {}})
    assert extras.install_command("serve") == f"pip install '{folder}[serve]'"
    installed_from({"url": folder.as_uri(), "dir_info": {"editable": True}})
    assert extras.install_command("serve") == f"pip install -e '{folder}[serve]'"


def test_from_a_wheel_it_is_its_file(installed_from, tmp_path):
    wheel = tmp_path / "mlcd-1-py3-none-any.whl"
    wheel.touch()
    installed_from({"url": wheel.as_uri(), "archive_info": {}})
    assert extras.install_command("s3") == f"pip install 'mlcd[s3] @ {wheel.as_uri()}'"


@pytest.mark.parametrize("kind", [{"dir_info": {}}, {"archive_info": {}}])
def test_from_a_place_that_is_gone_it_is_the_packages(kind, installed_from, tmp_path):
    installed_from({"url": (tmp_path / "gone").as_uri(), **kind})
    assert extras.install_command("text", "serve") == (
        "pip install 'tokenizers>=0.22' 'faiss-cpu>=1.12' 'missing-web>=1'"
    )


def test_from_a_repository_it_is_the_commit(installed_from):
    vcs = {"vcs": "git", "commit_id": "ab12", "requested_revision": "main"}
    url = "https://example.org/mlcd.git"
    installed_from({"url": url, "vcs_info": vcs, "subdirectory": "python"})
    assert extras.install_command("hub") == (
        f"pip install 'mlcd[hub] @ git+{url}@ab12#subdirectory=python'"
    )


def test_without_an_installation_it_is_the_checkout(monkeypatch):
    def absent(name):
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", absent)
    root = Path(extras.__file__).parents[1]
    assert extras.install_command("serve") == f"pip install '{root}[serve]'"
    assert extras.install_command_for("sklearn.datasets") == "pip install scikit-learn"


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("faiss", "'mlcd[serve]'"),
        ("missing_trainer.parts", "'mlcd[train]'"),
        ("skimage.feature", "'mlcd[train]'"),
        ("tokenizers", "'mlcd[text]'"),
        ("missing_client.grpc", "'mlcd[triton]'"),
        ("missing_web", "'mlcd[serve]'"),  # lacks less than train
        ("threadpoolctl", "'threadpoolctl>=3.8'"),
        ("scipy.optimize", "scipy"),  # of the tests alone
        ("unheard_of", "unheard-of"),
        ("yaml", "pyyaml"),
    ],
)
def test_a_module_is_brought_by_the_extra_that_declares_it_and_lacks_least(
    module, command, installed_from
):
    installed_from(None)
    assert extras.install_command_for(module) == f"pip install {command}"


def test_the_extra_of_the_product_comes_first_where_it_declares_the_package(installed_from):
    installed_from(None)
    assert extras.install_command_for("missing_web", likely="train") == "pip install 'mlcd[train]'"
    assert extras.install_command_for("faiss", likely="train") == "pip install 'mlcd[serve]'"


def test_no_other_place_writes_the_command():
    root = Path(extras.__file__).parents[1]
    written = [
        path
        for product in ("mlcd", "service", "training")
        for path in (root / product).rglob("*.py")
        if re.search(r"mlcd\[[a-z]|pip install '?\.?\[", path.read_text())
    ]
    assert written == []
