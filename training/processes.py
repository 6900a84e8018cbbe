"""The processes of a training: they meet, fail together, and report which of them is missing."""

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
from mlcd.world import Elsewhere, World, is_of_lost_process, open_world, torchrun_variable

_TIMEOUT: Final = timedelta(minutes=5)  # the longest wait of one process for another
_NO_TIMEOUT: Final = timedelta(days=30)
_DONE: Final = "done"
_ROLL_CALL_S: Final = 5.0  # survivors notice a loss within this time of each other
_ABSENT: Final = re.compile(r"Ranks? ([\d, ]+) failed to pass")


@dataclass(frozen=True)
class Processes:
    """The world of this process and its device.

    local_size: processes on this machine, of which this is number local_rank. cores: the CPU cores
    of this one. If there are several processes, they have gloo groups of the hosts: control for
    barriers, saving for the thread that writes checkpoints while training goes on.
    """

    world: World
    device: torch.device
    cores: int = 1
    local_size: int = 1
    local_rank: int = 0
    control: Any = None
    saving: Any = None

    def meet(self, point: str) -> None:
        """Waits for all. Raises Unavailable, which names the missing processes and `point`."""
        if self.world.size == 1:
            return
        try:
            dist.monitored_barrier(self.control, timeout=_TIMEOUT, wait_all_ranks=True)
        except RuntimeError as error:
            if self.world.rank or (absent := _ABSENT.search(str(error))) is None:
                raise Elsewhere from error
            raise Unavailable(
                f"process {absent[1].strip()} did not come to {point}",
                remedy="look at its output, then start again",
            ) from error

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Makes all processes leave by an exception if one of them does.

        Those that fail raise their own error, the others Elsewhere.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, once all know
            failure = error
        rank, size = self.world.rank, self.world.size
        first = -int(self.world.max(torch.tensor(-size if failure is None else -rank)))
        if first == rank and failure is not None:
            raise failure
        if first < size:
            raise Elsewhere from failure

    @contextmanager
    def lead(self, work: str) -> Iterator[None]:
        """Lets the first process of each machine leave the block before its others enter.

        They wait as long as it takes, and raise Elsewhere if the first fails. work: a name that no
        other work has.
        """
        if self.local_size == 1:
            yield
            return
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
        key = f"{work}/{self.world.rank - self.local_rank}"
        if self.local_rank:
            store.wait([key], _NO_TIMEOUT)
            if store.get(key).decode() != _DONE:
                raise Elsewhere
            yield
            return
        end = "failed"
        try:
            yield
            end = _DONE
        finally:
            store.set(key, end)

    @contextmanager
    def watch(self, work: list[str]) -> Iterator[None]:
        """Turns a lost connection or a time-out into Unavailable, which names the missing
        processes.

        work: its only entry names the work in progress.
        """
        try:
            yield
        except RuntimeError as error:
            if self.world.size == 1 or not is_of_lost_process(error):
                raise
            raise self._lost(work[0]) from error

    def _lost(self, work: str) -> Exception:
        """Returns the error, after survivors reported to torchrun's store; the others are gone."""
        rank, size = self.world.rank, self.world.size
        # The store ended with the process that kept it.
        try:
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - not public
            store.set(f"survivor/{rank}", work)
            time.sleep(_ROLL_CALL_S)
            present = [number for number in range(size) if store.check([f"survivor/{number}"])]
        except RuntimeError:
            present = [rank]
        if present[0] != rank:
            return Elsewhere()
        missing = ", ".join(str(number) for number in range(size) if number not in present)
        problem = (
            f"process {missing} is gone" if missing else "the processes cannot reach each other"
        )
        return Unavailable(
            f"{problem} (at {work})",
            remedy="the last checkpoint is intact; the same command goes on from it",
        )


@contextmanager
def open_processes(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    num_threads: int = 0,
    cores: int | None = None,
) -> Iterator[Processes]:
    """Opens the processes of this torchrun or of Ray, or this one alone.

    num_threads: CPU threads of each process, 0 for one on each of its cores. cores: those of this
    process, None for its share of the machine's. Raises ConfigInvalid if CUDA is asked for and
    there is none.
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
        own_device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
        yield Processes(world, own_device, cores, local_size, local_rank, control, saving)
