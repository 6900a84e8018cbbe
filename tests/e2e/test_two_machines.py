"""`mlcd train` on two machines: two network namespaces with a wire between them, one process each."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.conftest import succeed
from tests.e2e.test_train import (  # noqa: F401 - its fixtures
    arguments,
    assert_alike,
    labels,
    wait_for_steps,
    worker_of,
)

STEPS = 30
FIRST = "10.213.0.1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and the command ip",
    ),
]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespace(name):
    ip("netns", "add", name)
    try:
        yield name
    finally:
        ip("netns", "delete", name)


@pytest.fixture
def machines():
    """The names of two namespaces that reach each other and nothing else."""
    names = [f"mlcd-{os.getpid()}-{number}" for number in range(2)]
    ends = [f"m{os.getpid()}-{number}" for number in range(2)]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(namespace(name))
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"10.213.0.{number + 1}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, ends, strict=True))


def by_rank(number):
    return ("--node-rank", str(number), "--master-addr", FIRST, "--master-port", "29500")


def by_rendezvous(number):
    """These machines have no names, so each is told its address, and whether it is the first."""
    return (
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{FIRST}:29500", "--rdzv-id", "run1",
        "--local-addr", f"10.213.0.{number + 1}", "--rdzv-conf", f"is_host={number == 0}",
    )  # fmt: skip


def only_worker_of(launcher):
    """The process that torchrun started on a machine; a rendezvous may give it either rank."""
    for rank in range(2):
        with suppress(AssertionError):
            return worker_of(launcher, rank)
    raise AssertionError("no process")


def start_on(machines, meeting, *command):
    """Starts one process of the command on each machine, by torchrun, as the page says."""
    started = []
    for number, (name, end) in enumerate(machines):
        torchrun = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "2", "--nproc-per-node", "1", *meeting(number), "-m", "mlcd",
        ]  # fmt: skip
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *torchrun, *map(str, command)],
                env=os.environ | {"GLOO_SOCKET_IFNAME": end},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    return started


@pytest.mark.parametrize("meeting", [by_rank, by_rendezvous])
def test_two_machines_train_as_one_and_one_goes_on(meeting, machines, arguments, tmp_path):  # noqa: F811
    few = f"schedule.steps={STEPS}"
    succeed(*arguments("alone", few))
    together = start_on(machines, meeting, *arguments("together", few))
    for process in together:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert_alike(tmp_path / "together", tmp_path / "alone", tolerance=1e-5)

    every = "checkpoint.every_steps=2"
    lost = start_on(machines, meeting, *arguments("lost", few, every))
    wait_for_steps(tmp_path / "lost", 5, lost[0])
    os.kill(only_worker_of(lost[1]), signal.SIGKILL)
    for process in lost:
        process.communicate(timeout=120)
        assert process.returncode != 0
    assert not (tmp_path / "lost").exists(), "the run had ended before the machine was lost"
    succeed("train", "--resume", tmp_path / "lost")
    assert_alike(tmp_path / "lost", tmp_path / "alone", tolerance=1e-5)
