"""The layers are executable: they hold, and breaking one is noticed."""

import ast
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINTER = Path(sysconfig.get_path("scripts")) / "lint-imports"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINTER, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy(tmp_path):
    for package in ("mlcd", "training", "service"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_contract_holds():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("service/http/app.py", "import mlcd.training"),
        ("training/run/run_training.py", "import mlcd.service"),
        ("mlcd/artifacts/manifest.py", "import mlcd.pipelines.embed"),
        ("mlcd/images/decode.py", "import torch"),
        ("mlcd/losses/margins.py", "import mlcd.clustering.kmeans"),
        ("mlcd/encoders/hog.py", "import mlcd.encoders.openvino"),
        ("mlcd/encoders/encoder.py", "import mlcd.encoders.torch"),
        ("mlcd/encoders/__init__.py", "import torch"),
        ("mlcd/encoders/pixels.py", "import mlcd.models.vit"),
        ("service/resources.py", "import faiss"),
        ("mlcd/pipelines/embed.py", "import fastapi"),
        ("mlcd/image_bytes.py", "import mlcd.images.decode"),
        ("mlcd/client/loop_thread.py", "import torch"),
        ("mlcd/clustering/kmeans.py", "import torch"),
        ("mlcd/clustering/kmeans.py", "import mlcd.clustering.int8_matmul"),
        ("training/config.py", "import mlcd.training.step"),
        ("training/head/loss_config.py", "import mlcd.training.config"),
        ("training/pairs/pairs_step.py", "import mlcd.training.head.state"),
        ("training/data/loader.py", "import mlcd.training.pairs.pairs_config"),
        ("training/optim/groups.py", "import mlcd.training.head.partial_fc"),
        ("training/head/state.py", "import mlcd.training.step"),
        ("training/run/run_training.py", "import mlcd.training.evaluation.while_training"),
        ("training/rounds.py", "import mlcd.training.evaluation.while_training"),
        (
            "training/evaluation/texts/zero_shot.py",
            "import mlcd.training.evaluation.suite.definitions",
        ),
        ("service/http/problems.py", "import mlcd.service.http.dialects.openai"),
        ("service/settings.py", "import mlcd.service.fetch.budget"),
        ("service/inference/pipeline.py", "import mlcd.service.jobs.job"),
        ("service/jobs/service.py", "import mlcd.service.inference.pipeline"),
        ("service/keys/ring.py", "import mlcd.service.http.problems"),
        ("service/worker/loop.py", "import mlcd.service.http.app"),
        ("service/telemetry/metrics.py", "import mlcd.service.inference.served"),
        ("service/errors.py", "import mlcd.service.timings"),
        ("service/worker/task.py", "import uvicorn"),
        ("service/resources.py", "from starlette.types import Send"),
        ("service/jobs/job.py", "import fastapi"),
    ],
)
def test_a_forbidden_import_is_noticed(copy, file, line):
    (copy / file).write_text((copy / file).read_text() + f"\n{line}\n")
    result = lint(copy)
    assert result.returncode != 0
    assert "BROKEN" in result.stdout


@pytest.mark.parametrize("package", ["mlcd", "training", "service"])
def test_a_new_top_level_file_must_be_given_a_layer(copy, package):
    (copy / package / "utils.py").write_text("")
    assert lint(copy).returncode != 0


def test_a_new_file_of_clustering_may_not_reach_torch(copy):
    (copy / "mlcd" / "clustering" / "new.py").write_text("import torch\n")
    result = lint(copy)
    assert result.returncode != 0
    assert "Clustering reaches torch through eight bits and devices alone BROKEN" in result.stdout


def test_a_new_file_of_a_room_may_not_know_the_web(copy):
    (copy / "service" / "fetch" / "new.py").write_text("import starlette.requests\n")
    result = lint(copy)
    assert result.returncode != 0
    assert "The web is known to the door alone BROKEN" in result.stdout


def test_every_duration_of_the_service_is_in_timings():
    hidden = [
        f"{path.relative_to(ROOT)}: {target.id}"
        for path in (ROOT / "service").rglob("*.py")
        if path.name != "timings.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
        and target.id.endswith(("_S", "_MS"))
        and not target.id.endswith("_PER_S")
    ]
    assert hidden == []


@pytest.mark.parametrize(
    "package",
    [
        "mlcd",
        "mlcd.errors",
        "mlcd.types",
        "mlcd.artifacts.manifest",
        "mlcd.cli",
        "mlcd.images.sources",
        "mlcd.client",
    ],
)
def test_the_vocabulary_imports_nothing_heavy(package):
    code = (
        f"import {package}, sys; print([m for m in ('torch', 'redis', 'fastapi', 'faiss', "
        "'openvino') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_service_runs_without_torch(journey):
    """The api image carries none: opening the model, labeling and searching must not need it."""
    code = f"""
import asyncio, sys
sys.modules["torch"] = None
from mlcd.service.http.app import create_app
from mlcd.service.inference.find_model import find_model
from mlcd.service.resources import open_resources
from mlcd.service.settings import read_settings
async def main():
    settings = read_settings({{"model": {str(journey / "model")!r}, "state_dir": {str(journey)!r}}})
    async with open_resources(settings, find_model(settings)) as resources:
        create_app(resources)
        print(len(resources.centers.vectors) > 0, list(resources.collections))
asyncio.run(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "True ['demo']", result.stderr
