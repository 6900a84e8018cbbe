"""The environment that `mlcd` sets before it imports numpy, and its list of commands."""

import os
import subprocess
import sys

import click
import pytest

from mlcd.cli import cli
from mlcd.cores import available_cores

PRODUCTS = """
import sys, time
from mlcd.__main__ import main
sys.argv = ["mlcd", "--help"]
try:
    main()
except SystemExit:
    pass
import numpy as np
rows, centers = np.ones((1, 512), np.float32), np.ones((1000, 512), np.float32)
rows @ centers.T
before = time.process_time()
for _ in range(20):
    rows @ centers.T
    time.sleep(0.02)
print((time.process_time() - before) / 0.4)
"""


@pytest.mark.skipif(available_cores() < 2, reason="one core: BLAS has one thread")
def test_threads_of_blas_sleep_after_a_product():
    fast = ("OPENBLAS_THREAD_TIMEOUT", "OMP_NUM_THREADS")  # what our own tests set
    environment = {name: value for name, value in os.environ.items() if name not in fast}
    output = subprocess.check_output([sys.executable, "-c", PRODUCTS], text=True, env=environment)
    assert float(output.splitlines()[-1]) < 0.5, "a thread of BLAS occupies a core"


def test_the_list_of_commands_is_read_without_their_imports():
    lists = "import sys; sys.argv = ['mlcd', '--help']; from mlcd.cli import cli; "
    lists += "cli(standalone_mode=False); print(*sys.modules)"
    *printed, modules = subprocess.check_output([sys.executable, "-c", lists], text=True).split(
        "\n"
    )[:-1]
    assert not {"numpy", "pyarrow", "pydantic"} & {*modules.split()}
    rows = dict(line.split(maxsplit=1) for line in printed[printed.index("Commands:") + 1 :])
    with click.Context(cli) as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            assert rows[name].removesuffix("...") in command.get_short_help_str(200)
