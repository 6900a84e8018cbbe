"""The environment that `mlcd` sets before it imports numpy."""

import os
import subprocess
import sys

import pytest

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
