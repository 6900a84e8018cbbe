"""Steps in which a GPU needs no word from the host."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting():
    """Raises where the host waits for the GPU."""
    with warnings.catch_warnings():
        # It says once in a process that it does not find every wait.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
