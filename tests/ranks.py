"""Processes that compute together, as torchrun would start them."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch.distributed
import torch.multiprocessing

IMPORTED_ONCE = [
    "mlcd.cli",
    "mlcd.training.run.run_training",
    "mlcd.training.evaluation.cli",
    "sklearn.linear_model",
]


def run_ranks(work: Callable[..., None], size: int, *arguments: object) -> None:
    """Runs `work(rank, size, *arguments)` in `size` processes.

    They are forks of one that has imported what takes each of them seconds otherwise.
    """
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    torch.multiprocessing.start_processes(
        work, (size, *arguments), nprocs=size, start_method="forkserver"
    )


def call_together(size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command in `size` processes.

    They meet at a store that outlives them, as torchrun's does. The largest of their exit statuses
    and all that they write are the result.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_call, size, folder, store.port, list(map(str, arguments)))
        said = {
            name: [Path(folder, f"{name}-{rank}").read_text() for rank in range(size)]
            for name in ("status", "stdout", "stderr")
        }
    status = max(map(int, said["status"]))
    return subprocess.CompletedProcess(
        arguments, status, "".join(said["stdout"]), "".join(said["stderr"])
    )


def _call(rank: int, size: int, folder: str, port: int, arguments: list[str]) -> None:
    from mlcd.cli import main

    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):
        name = stream.name.strip("<>")
        with Path(folder, f"{name}-{rank}").open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["mlcd", *arguments]
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code
    Path(folder, f"status-{rank}").write_text(str(int(status or 0)))
