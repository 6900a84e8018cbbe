"""The start of a server: what it imports, and the process that it launches first."""

import os
import subprocess
import sys

from mlcd.service.inference.engine.launched import launch_engine
from tests.conftest import run_mlcd

LATER = ("faiss", "httpcore", "rich", "torch", "openvino", "mlcd.pipelines.shard")


def imported_by(module):
    """Returns the names of modules that a process has after importing one."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_server_imports_no_more_than_its_first_request_needs():
    assert not imported_by("mlcd.service.serve.server").intersection(LATER)


def test_the_engine_is_launched_before_the_libraries_are_imported():
    assert not imported_by("mlcd.service.serve.cli").intersection(("numpy", "pydantic", "fastapi"))


def test_a_launched_engine_without_an_order_ends_by_itself():
    engine = launch_engine()
    engine.dismiss()
    assert engine.process.wait(timeout=60) == 0


def test_a_wrong_setting_after_the_launch_is_one_line():
    done = run_mlcd("serve", "--model", "hog", env={**os.environ, "MLCD_DRAIN_S": "soon"})
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
