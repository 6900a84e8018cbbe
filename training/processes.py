"""The processes of a training: barriers, errors on all processes, reports of lost processes."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from mlcd.cores import available_cores
from mlcd.errors import ConfigInvalid, Unavailable
from mlcd.world import (
    ReportedElsewhere,
    World,
    is_of_lost_process,
    open_world,
    own_gpu,
    torchrun_variable,
)

_TIMEOUT: Final = timedelta(minutes=5)  # for collectives and barriers
_NO_TIMEOUT: Final = timedelta(days=30)
_DONE: Final = "done"
_ROLL_CALL_S: Final = 5.0  # all survivors notice a lost process within this time
_ABSENT: Final = re.compile(r"Ranks? ([\d, ]+) failed to pass")


@dataclass(frozen=True)
class Processes:
    """The world of this process and its device.

    cores: CPU cores for this process. local_size: number of processes on this machine. local_rank:
    this process's index among them. With several processes, there are two gloo (CPU) groups:
    control for barriers, and saving for the checkpoint thread, which runs while training continues.
    """

    world: World
    device: torch.device
    cores: int = 1
    local_size: int = 1
    local_rank: int = 0
    control: Any = None
    saving: Any = None

    def meet(self, point: str) -> None:
        """Waits for all processes. Raises Unavailable, naming the missing processes and `point`."""
        if self.world.size == 1:
            return
        try:
            dist.monitored_barrier(self.control, timeout=_TIMEOUT, wait_all_ranks=True)
        except RuntimeError as error:
            if self.world.rank or (absent := _ABSENT.search(str(error))) is None:
                raise ReportedElsewhere from error
            raise Unavailable(
                f"process {absent[1].strip()} did not reach {point}",
                remedy="look at its output, then start again",
            ) from error

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raises on all processes if the block raises on any of them.

        The failed process of lowest rank raises its own error, the others ReportedElsewhere.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, on all processes
            failure = error
        rank, size = self.world.rank, self.world.size
        # `size` if no process failed.
        lowest_failed_rank = -int(self.world.max(torch.tensor(-size if failure is None else -rank)))
        if lowest_failed_rank == rank and failure is not None:
            raise failure
        if lowest_failed_rank < size:
            raise ReportedElsewhere from failure

    @contextmanager
    def lead(self, work: str) -> Iterator[None]:
        """Runs the block on local rank 0 first; the machine's other processes run it afterwards.

        They wait without a timeout, and raise ReportedElsewhere if local rank 0 fails. work: unique
        key of this block in torchrun's store.
        """
        if self.local_size == 1:
            yield
            return
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
        key = f"{work}/{self.world.rank - self.local_rank}"
        if self.local_rank:
            store.wait([key], _NO_TIMEOUT)
            if store.get(key).decode() != _DONE:
                raise ReportedElsewhere
            yield
            return
        outcome = "failed"
        try:
            yield
            outcome = _DONE
        finally:
            store.set(key, outcome)

    @contextmanager
    def watch(self, current: list[str]) -> Iterator[None]:
        """Turns a lost connection or a timeout into Unavailable, which names the missing processes.

        current: one-element list with the name of the work in progress, quoted in the error; the
        caller replaces the element as the work advances.
        """
        try:
            yield
        except RuntimeError as error:
            if self.world.size == 1 or not is_of_lost_process(error):
                raise
            raise self._describe_loss(current[0]) from error

    def _describe_loss(self, work: str) -> Exception:
        """Returns Unavailable on the lowest surviving rank, ReportedElsewhere on other survivors.

        Each survivor registers in torchrun's store; the ranks that did not are reported as lost.
        """
        rank, size = self.world.rank, self.world.size
        try:
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
            store.set(f"survivor/{rank}", work)
            time.sleep(_ROLL_CALL_S)
            present = [number for number in range(size) if store.check([f"survivor/{number}"])]
        except RuntimeError:  # the process that hosts the store is lost
            present = [rank]
        if present[0] != rank:
            return ReportedElsewhere()
        missing = ", ".join(str(number) for number in range(size) if number not in present)
        problem = (
            f"process {missing} is gone" if missing else "the processes cannot reach each other"
        )
        return Unavailable(
            f"{problem} (at {work})",
            remedy="the last checkpoint is intact; run the same command again to resume from it",
        )


@contextmanager
def open_processes(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    num_threads: int = 0,
    cores: int | None = None,
) -> Iterator[Processes]:
    """Joins the process group started by torchrun or Ray; without either, this process is alone.

    num_threads: CPU threads of each process; 0 uses one per core. cores: CPU cores for this
    process; None divides the machine's cores evenly among its processes. Raises ConfigInvalid for
    device="cuda" without a CUDA GPU.
    """
    local_size, local_rank = (
        torchrun_variable("LOCAL_WORLD_SIZE", 1),
        torchrun_variable("LOCAL_RANK", 0),
    )
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigInvalid("device=cuda, but torch finds no CUDA GPU", remedy="use device=auto")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    cores = cores or max(1, available_cores() // local_size)
    torch.set_num_threads(num_threads or cores)
    with open_world(cuda=use_cuda, timeout=_TIMEOUT) as world:
        if world.size == 1:
            yield Processes(world, torch.device("cuda" if use_cuda else "cpu"), cores)
            return
        control, saving = (dist.new_group(backend="gloo", timeout=_TIMEOUT) for _ in range(2))
        own_device = torch.device("cuda", own_gpu()) if use_cuda else torch.device("cpu")
        yield Processes(world, own_device, cores, local_size, local_rank, control, saving)
