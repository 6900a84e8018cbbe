"""What the engines say of bf16 on a CPU that has none: `--plain-cpu` makes one of any."""

import os
import subprocess
import sys

import pytest

from tests.conftest import PLAIN_CPU

pytestmark = pytest.mark.plain_cpu


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_a_plain_cpu_computes_no_bf16(engine):
    """In a process of its own: a library asks once."""
    code = f"from mlcd.encoders.{engine} import computes_bf16; print(computes_bf16())"
    command = [sys.executable, "-c", code]
    told = subprocess.run(
        command, env={**os.environ, **PLAIN_CPU}, capture_output=True, text=True, check=True
    )
    assert told.stdout == "False\n"


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_the_option_makes_this_process_one_of_a_plain_cpu(engine, pytestconfig):
    if not pytestconfig.getoption("plain_cpu"):
        pytest.skip("not asked for with --plain-cpu")
    encoders = pytest.importorskip(f"mlcd.encoders.{engine}")
    assert not encoders.computes_bf16()
